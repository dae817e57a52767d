"""Tensors by name, out of a checkpoint folder or a .pth file."""

import math
import pickle
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mamba_fsdp.checkpoint.contents import BAD_CONTENT, read_state
from mamba_fsdp.checkpoint.folder import Reader, is_model
from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.world import World

# What a person types who trusts a file that holds programs. It runs them.
CONVERSION = (
    """python -c "import torch; keep = lambda v: keep(v.state_dict()) if hasattr(v, 'state_dict') else """
    "{{k: keep(w) for k, w in v.items()}} if isinstance(v, dict) else v if torch.is_tensor(v) else None; "
    """torch.save(keep(torch.load('{path}', 'cpu', weights_only=False)), '{path}.weights.pth')\""""
)
# What torch.load raises for a damaged pickle, or one of more than tensors and plain values.
BAD_PICKLE = (pickle.UnpicklingError, AssertionError, *BAD_CONTENT)


@dataclass
class Tensors:
    """Tensors by name, read when asked for. slice(name, start, stop): elements [start, stop) of a flattened tensor."""

    source: Path  # the file or folder, for messages
    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]  # name -> the name it shares a tensor with
    slice: Callable[[str, int, int], torch.Tensor]  # 1-D on the CPU

    def get(self, name: str) -> torch.Tensor:
        """One whole tensor on the CPU. Raises UserError when there is none of that name."""
        name = self.tied.get(name, name)
        if name not in self.shapes:
            raise UserError(f"{self.source} does not fit the model: it lacks {name}")
        return self.slice(name, 0, math.prod(self.shapes[name])).view(self.shapes[name])


def open_tensors(path: str | Path, world: World) -> Tensors:
    """The model's Tensors in a checkpoint folder, or all in a .pth file, those of nested dicts as `outer.inner`. Called
    by all ranks. Raises UserError, of any rank on all; executes nothing."""
    path = Path(path)
    if path.is_dir():
        return _open_folder(path, world)
    return world.on_all_ranks(partial(_open_pth, path))


def _open_folder(path, world):
    reader = Reader(path, world.on_rank0(partial(read_state, path)))
    shapes = {}
    tied = {}
    for stored, entry in reader.contents.tensors.items():
        if is_model(stored):
            name = stored.removeprefix("model/")
            shapes[name] = tuple(entry["shape"])
            for other in entry["tied"]:
                tied[other] = name
    return Tensors(
        path, shapes, tied, lambda name, start, stop: reader.read(f"model/{name}", start, stop)
    )


def _open_pth(path):
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
    return Tensors(path, shapes, {}, lambda name, start, stop: found[name].reshape(-1)[start:stop])


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
