"""Reads what torch.save writes, without executing anything, and writes it with one tensor in memory at a time."""

import pickle
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
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

# The command for a user who trusts a file that may hold code. It runs that code.
CONVERSION = (
    """{python} -c "import torch; keep = lambda v: keep(v.state_dict()) if hasattr(v, 'state_dict') else """
    "{{k: keep(w) for k, w in v.items()}} if isinstance(v, dict) else v if torch.is_tensor(v) else None; "
    """torch.save(keep(torch.load('{path}', 'cpu', weights_only=False)), '{path}.weights.pth')\""""
)
MOST_EXPANSION = 10  # of a compressed archive
HARMLESS = 1 << 28  # bytes, allowed however small the archive is
# What torch.load raises for a damaged pickle, or for one that holds more than tensors and plain values.
BAD_PICKLE = (pickle.UnpicklingError, AssertionError, *CORRUPTION_ERRORS)


class PthTensors(TensorSource):
    """The model's tensors in a file; tensors in nested dicts are named `outer.inner`."""

    def __init__(self, path: Path):
        """Opens the file without executing anything. Raises UserError."""
        self.source = path
        try:
            content = retry_io(partial(_load, path), path)
            stored = dict(_tensors_in(content, "", set()))
            _check_elements(path, stored)
        except OSError as error:
            raise storage_error(error, f"can't read {path}: {error.strerror}") from None
        except (RuntimeError, EOFError, zipfile.BadZipFile):  # their messages mean nothing to users
            raise UserError(
                f"{path} ({size_of(path):,} bytes) is cut short or damaged; copy or download it "
                "again"
            ) from None
        except BAD_PICKLE:
            raise UserError(
                f"{path} is damaged or holds more than tensors and plain values, which only its own program "
                "reads. If you trust it, save its tensors alone: "
                f"{CONVERSION.format(path=path, python=python())}"
            ) from None
        if not stored:
            raise UserError(f"{path} is not a dict of tensors by parameter name")
        names = stored_names(path, stored)
        self.tensors = {name: stored[stored_name] for name, stored_name in names.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def slice(self, name: str, start: int, stop: int) -> Tensor:
        return self.flatten(name, self.tensors[name])[start:stop]


def _load(path: Path) -> Any:
    """Returns the content of a file. Raises OSError, UserError, and what torch raises for a damaged file."""
    is_zip = _check_holds_no_program(path)
    # Mapped, so that only what is read is loaded. Files from before torch 1.6 can't be mapped. In a compressed file, the
    # compressed bytes would be taken for numbers.
    mapped = is_zip and _is_uncompressed(path)
    try:
        return torch.load(str(path), map_location="cpu", weights_only=True, mmap=mapped)
    except RuntimeError as error:
        raise parse_os_error(error) or error from None


def _is_uncompressed(path: Path) -> bool:
    """Returns whether no entry of a zip archive is compressed. Raises UserError if the archive says that it holds far
    more than weights can be compressed to."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    size = sum(entry.file_size for entry in entries)
    if size > max(MOST_EXPANSION * size_of(path), HARMLESS):
        raise UserError(
            f"{path} ({size_of(path):,} bytes) says that it holds {size:,}, more than weights can be compressed "
            "to; save it again with torch.save"
        )
    return all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)


def _check_elements(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises UserError for a tensor that repeats stored numbers: a few bytes could ask for any amount of memory."""
    for name, tensor in tensors.items():
        needed = tensor.numel() * tensor.element_size()
        if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() < needed:
            raise UserError(
                f"{path}: {name} should have {tensor.numel():,} elements, but the file holds fewer; save it again "
                "after contiguous()"
            )


def _tensors_in(content: Any, prefix: str, visited: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor); each dict is visited once, however many others hold it."""
    if not isinstance(content, dict) or id(content) in visited:
        return
    visited.add(id(content))
    for name, value in content.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        else:
            yield from _tensors_in(value, f"{prefix}{name}.", visited)


def _check_holds_no_program(path: Path) -> bool:
    """Returns whether a .pth file is a zip archive. Raises UserError if it is not a .pth file, and for TorchScript and
    tar archives: torch before 2.6 opens those in ways that weights_only does not restrain (CVE-2025-32434)."""
    with open_to_read(path) as file:
        begin = file.read(4)
    is_zip = begin == b"PK\x03\x04"
    # torch.load uses this reader too, so both see the same archive.
    is_script = (
        is_zip and "constants.pkl" in torch._C.PyTorchFileReader(str(path)).get_all_records()
    )
    if is_script or tarfile.is_tarfile(path):
        raise UserError(
            f"{path} is a TorchScript or tar archive, which may hold code; save its state dict with torch.save"
        )
    # Each pickle that torch.save writes begins with the byte 0x80.
    if begin and not is_zip and begin[0] != 0x80:
        raise UserError(
            f"{path} holds no weights: it is neither a safetensors file nor a file of torch.save"
        )
    return is_zip


class _BeatingFile:
    """A file that counts each write as progress, as far as torch.save needs a file."""

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
    """Writes CPU tensors under these names, and each tensor of `tied`, {second name: name}, under two. tensors: see
    write_safetensors. Raises as write_durably does.

    torch.save takes all tensors at once. They come from a temporary safetensors file that is mapped, so that memory holds
    one of them, and pages of that file that the kernel can drop.
    """
    mapped = path.with_suffix(".tensors")
    write_safetensors(mapped, names, tensors)
    file = retry_io(partial(map_tensors, mapped), mapped)
    content = {name: file.get_tensor(name) for name in names}
    for second_name, name in tied.items():
        content[second_name] = content[name]

    def write(file: BinaryIO) -> None:
        try:
            torch.save(content, _BeatingFile(file))
        except RuntimeError as error:  # torch hides the disk's error
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    write_durably(path, write)
    delete(mapped)
