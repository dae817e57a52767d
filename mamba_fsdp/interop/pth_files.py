"""Reads files of torch.save without executing code from them, and writes such files with one tensor in memory at a time."""

import pickle
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mamba_fsdp.checkpoint.contents import CORRUPTION_ERRORS
from mamba_fsdp.checkpoint.tensors import TensorSource
from mamba_fsdp.errors import UserError, python
from mamba_fsdp.interop.fms_files import stored_names
from mamba_fsdp.interop.safetensors_files import map_tensors, write_safetensors
from mamba_fsdp.storage.retry import (
    delete,
    open_to_read,
    parse_os_error,
    retry_io,
    size_of,
    storage_error,
    write_durably,
)
from mamba_fsdp.this_process import progress

# A command for users who trust a file that can contain code. The command executes this code.
CONVERSION = (
    """{python} -c "import torch; keep = lambda v: keep(v.state_dict()) if hasattr(v, 'state_dict') else """
    "{{k: keep(w) for k, w in v.items()}} if isinstance(v, dict) else v if torch.is_tensor(v) else None; "
    """torch.save(keep(torch.load('{path}', 'cpu', weights_only=False)), '{path}.weights.pth')\""""
)
MAX_COMPRESSION = 10  # the maximal ratio of content to file size of a compressed archive
SAFE_SIZE = 1 << 28  # archives with at most this many bytes of content are always accepted
# Exceptions of torch.load for a damaged pickle, or for one that contains more than tensors and plain values.
PICKLE_ERRORS = (pickle.UnpicklingError, AssertionError, *CORRUPTION_ERRORS)


class PthTensors(TensorSource):
    """The tensors of the model in a file of torch.save. Tensors in nested dicts get names such as `outer.inner`."""

    def __init__(self, path: Path):
        """Opens the file without executing code from it. Raises UserError if it is damaged or contains other objects than
        tensors and plain values, and StorageError after a minute of retries."""
        self.source = path
        try:
            content = retry_io(_load, path, path)
            stored = dict(_tensors_in(content, "", set()))
            _check_elements(path, stored)
        except OSError as error:
            raise storage_error(error, f"can't read {path}: {error.strerror}") from None
        except (RuntimeError, EOFError, zipfile.BadZipFile):  # their messages mean nothing to users
            raise UserError(
                f"{path} ({size_of(path):,} bytes) is incomplete or damaged; copy or download it "
                "again"
            ) from None
        except PICKLE_ERRORS:
            raise UserError(
                f"{path} is damaged or contains more than tensors and plain values, so only its own program "
                "can read it. If you trust it, save only its tensors: "
                f"{CONVERSION.format(path=path, python=python())}"
            ) from None
        if not stored:
            raise UserError(
                f"{path} is not a dict of tensors by parameter name; save model.state_dict() with torch.save"
            )
        names = stored_names(path, stored)
        self.tensors = {name: stored[stored_name] for name, stored_name in names.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def slice(self, name: str, start: int, stop: int) -> Tensor:
        return self.flatten(name, self.tensors[name])[start:stop]


def _load(path: Path) -> Any:
    """Loads a file. Raises OSError, UserError, and the exceptions of torch for a damaged file."""
    is_zip = _check_contains_no_code(path)
    # The file is mapped into memory, so that only tensors that are used are read. Files from before torch 1.6 can't be
    # mapped. In a mapped compressed file, torch would interpret the compressed bytes as numbers.
    mapped = is_zip and _is_uncompressed(path)
    try:
        return torch.load(str(path), map_location="cpu", weights_only=True, mmap=mapped)
    except RuntimeError as error:
        raise parse_os_error(error) or error from None


def _is_uncompressed(path: Path) -> bool:
    """Returns whether all entries of a zip archive are stored without compression. Raises UserError if the uncompressed size
    in the archive is far larger than weights could have."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    size = sum(entry.file_size for entry in entries)
    if size > max(MAX_COMPRESSION * size_of(path), SAFE_SIZE):
        raise UserError(
            f"{path} has {size_of(path):,} bytes, but {size:,} after decompression; weights can't be compressed that "
            "much; save it again with torch.save"
        )
    return all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)


def _check_elements(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises UserError for a tensor with more elements than are stored. Such a tensor repeats stored numbers, so a small
    file could require any amount of memory."""
    for name, tensor in tensors.items():
        needed = tensor.numel() * tensor.element_size()
        if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() < needed:
            raise UserError(
                f"{path}: {name} should have {tensor.numel():,} elements, but the file contains fewer; save it again "
                "after contiguous()"
            )


def _tensors_in(content: Any, prefix: str, visited: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for all tensors in nested dicts. A dict that occurs several times is only visited once."""
    if not isinstance(content, dict) or id(content) in visited:
        return
    visited.add(id(content))
    for name, value in content.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        else:
            yield from _tensors_in(value, f"{prefix}{name}.", visited)


def _check_contains_no_code(path: Path) -> bool:
    """Returns whether a .pth file is a zip archive. Raises UserError if it is not a .pth file, and for TorchScript and tar
    archives, because weights_only does not prevent torch before 2.6 from executing their code (CVE-2025-32434)."""
    with open_to_read(path) as file:
        begin = file.read(4)
    is_zip = begin == b"PK\x03\x04"
    # torch.load uses the same reader, so the checked content is the content that is loaded.
    is_script = (
        is_zip and "constants.pkl" in torch._C.PyTorchFileReader(str(path)).get_all_records()
    )
    if is_script or tarfile.is_tarfile(path):
        raise UserError(
            f"{path} is a TorchScript or tar archive, which can contain code; save its state dict with torch.save"
        )
    # Each pickle of torch.save begins with the byte 0x80.
    if begin and not is_zip and begin[0] != 0x80:
        raise UserError(
            f"{path} does not contain weights; give a safetensors file or a file of torch.save"
        )
    return is_zip


class _ProgressFile:
    """A wrapper of a file for torch.save that reports each write as progress to the watchdog."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.flush = file.flush

    def write(self, data: Any) -> int:
        progress.touch()
        return self.file.write(data)


def write_pth(
    path: Path,
    names: Sequence[str],
    tensors: Callable[[], Iterable[Tensor]],
    tied: Mapping[str, str],
) -> None:
    """Writes CPU tensors into a file of torch.save.

    names, tensors: see write_safetensors. tied: {second name: name} for tensors that are stored under two names. Raises
    StorageError after a minute of retries, and other OSErrors immediately.

    torch.save needs all tensors at the same time. They are first written to a temporary safetensors file. This file is
    mapped into memory, so that the kernel can drop pages that are not in use.
    """
    mapped = path.with_suffix(".tensors")
    write_safetensors(mapped, names, tensors)
    file = retry_io(map_tensors, mapped, mapped)
    content = {name: file.get_tensor(name) for name in names}
    for second_name, name in tied.items():
        content[second_name] = content[name]

    def write(file: BinaryIO) -> None:
        try:
            torch.save(content, _ProgressFile(file))
        except RuntimeError as error:  # torch raises it in place of an error of the disk
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    write_durably(path, write)
    delete(mapped)
