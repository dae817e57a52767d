"""What torch.save writes: read without executing anything, and written one tensor at a time.

A file is a zip archive of data/0, data/1, ... and data.pkl. In the pickle each tensor is what torch.Tensor.__reduce_ex__ makes of it, its storage a persistent id, as in
torch.serialization._save. torch's own writer makes the archive.
"""

import io
import pickle
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mamba_fsdp.checkpoint.contents import BAD_CONTENT
from mamba_fsdp.checkpoint.tensors import Tensors
from mamba_fsdp.errors import UserError
from mamba_fsdp.heartbeat import heart

# What a person types who trusts a file that holds programs. It runs them.
CONVERSION = (
    """python -c "import torch; keep = lambda v: keep(v.state_dict()) if hasattr(v, 'state_dict') else """
    "{{k: keep(w) for k, w in v.items()}} if isinstance(v, dict) else v if torch.is_tensor(v) else None; "
    """torch.save(keep(torch.load('{path}', 'cpu', weights_only=False)), '{path}.weights.pth')\""""
)
# What torch.load raises for a damaged pickle, or one of more than tensors and plain values.
BAD_PICKLE = (pickle.UnpicklingError, AssertionError, *BAD_CONTENT)


def open_pth(path: Path) -> Tensors:
    """All Tensors of a file, those of nested dicts as `outer.inner`. Raises UserError; executes nothing."""
    try:
        is_zip = _check_holds_no_program(path)
        # Mapped, so that only what is read is loaded; files from before torch 1.6 can't be, and what is compressed
        # would be taken for numbers.
        mapped = is_zip and _is_stored(path)
        content = torch.load(str(path), map_location="cpu", weights_only=True, mmap=mapped)
        found = dict(_tensors_in(content, "", set()))
        _check_stored(path, found)
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from None
    except (RuntimeError, EOFError, zipfile.BadZipFile):  # whose words are torch's own affairs
        raise UserError(
            f"{path} ({path.stat().st_size:,} bytes) is cut short or damaged; copy or download it "
            "again"
        ) from None
    except BAD_PICKLE:
        raise UserError(
            f"{path} is damaged or holds more than tensors and plain values, which only its own program "
            "reads. If you trust it, save its tensors alone: "
            f"{CONVERSION.format(path=path)}"
        ) from None
    if not found:
        raise UserError(f"{path} is not a dict of tensors by parameter name")
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}

    def read(name, start, stop):
        return found[name].reshape(-1)[start:stop]

    return Tensors(path, shapes, read)


def _is_stored(path):
    """Whether every entry of a zip archive lies in it as it is, without compression."""
    with zipfile.ZipFile(path) as archive:
        return all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())


def _check_stored(path, tensors):
    """Raises UserError for a tensor whose numbers stand for more than one element each: a few bytes could ask for any
    amount of memory."""
    for name, tensor in tensors.items():
        needed = tensor.numel() * tensor.element_size()
        if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() < needed:
            raise UserError(
                f"{path}: {name} should have {tensor.numel():,} elements, but the file holds fewer; save it again "
                "after contiguous()"
            )


def _tensors_in(content: Any, prefix: str, visited: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Visits each dict once, however many hold it."""
    if not isinstance(content, dict) or id(content) in visited:
        return
    visited.add(id(content))
    for name, value in content.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        else:
            yield from _tensors_in(value, f"{prefix}{name}.", visited)


def _check_holds_no_program(path):
    """Whether a .pth file is a zip archive. Raises UserError for what is no .pth file, and for TorchScript and tar
    archives: torch before 2.6 opens those in ways that weights_only does not restrain (CVE-2025-32434)."""
    with open(path, "rb") as file:
        begin = file.read(4)
    is_zip = begin == b"PK\x03\x04"
    # The reader that torch.load itself asks, so that both see the same archive.
    is_script = (
        is_zip and "constants.pkl" in torch._C.PyTorchFileReader(str(path)).get_all_records()
    )
    if is_script or tarfile.is_tarfile(path):
        raise UserError(
            f"{path} is a TorchScript or tar archive, which may hold programs; save its state dict with torch.save"
        )
    if begin and not is_zip and begin[0] != 0x80:  # with which each pickle of torch.save begins
        raise UserError(
            f"{path} holds no weights: it is neither a safetensors file nor one of torch.save"
        )
    return is_zip


# Writing


class _Written:
    """Stands in the pickle for a tensor whose elements are in the archive."""

    def __init__(self, tensor: torch.Tensor, key: str):
        typed_storage = tensor.new_empty(0)._typed_storage()
        kind = getattr(torch, typed_storage._pickle_storage_type())
        storage = ("storage", kind, key, "cpu", tensor.numel())
        shape = tuple(tensor.shape)
        hooks: OrderedDict = OrderedDict()
        self.arguments = (storage, 0, shape, tensor.stride(), False, hooks)

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v2, self.arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        is_storage = isinstance(obj, tuple) and obj[:1] == ("storage",)
        return obj if is_storage else None


def write_pth(
    path: Path, tensors: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str]
) -> None:
    """Writes (name, CPU tensor) pairs and, for each of `tied`, {other name: name}, a second name. Raises OSError."""
    try:
        with open(path, "xb") as file:
            archive = torch._C.PyTorchFileWriter(file)
            try:
                _write_records(archive, tensors, tied)
            finally:
                archive.write_end_of_file()  # else its destructor would, and end the process where it can't
    except RuntimeError as error:  # torch covers what the disk says
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _write_records(archive, tensors, tied):
    content = {}
    for number, (name, tensor) in enumerate(tensors):
        tensor = tensor.contiguous()
        content[name] = _Written(tensor, str(number))
        elements = tensor.view(-1).view(torch.uint8).numpy()
        write_record(archive, f"data/{number}", elements.tobytes())
    for other, name in tied.items():
        content[other] = content[name]
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(content)
    write_record(archive, "data.pkl", pickled.getvalue())


def write_record(archive: Any, name: str, data: bytes) -> None:
    archive.write_record(name, data, len(data))
    heart.beat()
