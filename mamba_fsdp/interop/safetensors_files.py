"""Tensors in safetensors files as transformers lays them out: one, model.safetensors, or several and an index, which
are read only.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mamba_fsdp.checkpoint.files import DTYPE_NAMES
from mamba_fsdp.checkpoint.tensors import Tensors
from mamba_fsdp.errors import UserError
from mamba_fsdp.storage import read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def open_safetensors(path: Path) -> Tensors:
    """Returns the Tensors of a file, or of those that an index names, read when asked for. Raises UserError for a
    missing or damaged one."""
    expected: dict[Path, list[str]] = {path: []}  # the names that each file has to hold
    if path.name == INDEX:
        index = read_object(path, {"weight_map": {"": ...}}, "copy or download it again")
        expected = {}
        for name, file_name in index["weight_map"].items():
            expected.setdefault(path.parent / file_name, []).append(name)
    files: dict[str, Any] = {}  # by parameter name, the open file that it is in
    for part, names in expected.items():
        file = _open(part)
        for name in file.keys():
            files[name] = file
        lacking = sorted(set(names) - set(file.keys()))
        if lacking:
            raise UserError(f"{part} lacks {lacking[0]}, which {INDEX} says is in it")
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}

    def read(name, start, stop):
        return files[name].get_tensor(name).reshape(-1)[start:stop]

    return Tensors(path, shapes, read)


def _open(path):
    try:
        open(path, "rb").close()  # safe_open says "no such file" whatever is wrong
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path} is missing, but {INDEX} names it; copy or download it") from None
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise UserError(
            f"{path} ({path.stat().st_size:,} bytes) is cut short or damaged ({error}); copy or "
            "download it again"
        ) from None


def write_safetensors(path: Path, names: Sequence[str], tensors: Iterable[Tensor]) -> None:
    """Writes tensors under these names into one file, one tensor in memory at a time. Raises OSError.

    The format is 8 bytes of header length, a JSON header, then the data. What the header says of a tensor is known once
    the tensor is read, so that room is left for it, which spaces fill up.
    """
    room = 256 + sum(len(name) + 256 for name in names)
    room -= room % 8  # the data begins at a multiple of 8
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    with open(path, "xb") as file:
        file.seek(8 + room)
        for name, tensor in zip(names, tensors):
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy())
            end = position + tensor.nbytes
            header[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [position, end],
            }
            position = end
        file.seek(0)
        file.write(room.to_bytes(8, "little") + json.dumps(header).encode().ljust(room))
