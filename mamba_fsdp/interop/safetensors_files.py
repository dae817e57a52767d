"""Reads and writes tensors in safetensors files as transformers arranges them: in one, model.safetensors, or (only
read) in several with an index.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mamba_fsdp.checkpoint.files import HeaderEntry, encode_header
from mamba_fsdp.checkpoint.tensors import TensorSource
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.fms_files import stored_names
from mamba_fsdp.storage.retry import (
    open_to_read,
    parse_os_error,
    retry_io,
    size_of,
    storage_error,
    write_durably,
)
from mamba_fsdp.storage.typed_json import FileName, read_object
from mamba_fsdp.this_process import progress

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass
class Index:
    """The fields that are read of INDEX."""

    HAS_OTHER_FIELDS = True
    weight_map: dict[str, FileName]  # {parameter name: its file}


class SafetensorsTensors(TensorSource):
    """The model's tensors in a file, or in the files that an index names."""

    def __init__(self, path: Path):
        """Opens the file. Raises UserError if it, or one that the index names, is missing or damaged."""
        self.source = path
        files_by_name: dict[str, FileName] = {}
        if path.name == INDEX:
            index = read_object(path, Index, "copy or download it again")
            files_by_name = index.weight_map
        opened: dict[str, Any] = {}  # {stored name: the tensor's file}
        for file_name in dict.fromkeys(files_by_name.values()) or [path.name]:
            file = _open(path.parent / file_name)
            opened |= dict.fromkeys(file.keys(), file)
        for name, file_name in files_by_name.items():
            if name not in opened:
                raise UserError(
                    f"{path.parent / file_name} lacks {name}, which {INDEX} says is in it"
                )
        self.opened = opened
        self.stored_names = stored_names(path, opened)
        self.shapes = {}
        for name, stored in self.stored_names.items():
            self.shapes[name] = tuple(opened[stored].get_slice(stored).get_shape())

    def slice(self, name: str, start: int, stop: int) -> Tensor:
        stored = self.stored_names[name]
        return self.flatten(stored, self.opened[stored].get_tensor(stored))[start:stop]


def _open(path: Path) -> Any:
    try:
        return retry_io(partial(map_tensors, path), path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing, but {INDEX} names it; copy or download it") from None
    except OSError as error:
        raise storage_error(error, f"can't read {path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise UserError(
            f"{path} ({size_of(path):,} bytes) is cut short or damaged ({error}); copy or "
            "download it again"
        ) from None


def map_tensors(path: Path) -> Any:
    """Returns the safetensors file, opened, with its tensors mapped into memory. Raises OSError and SafetensorError."""
    open_to_read(path).close()  # safe_open says "no such file" whatever is wrong
    try:
        return safe_open(path, framework="pt")
    except RuntimeError as error:
        raise parse_os_error(error) or error from None


def write_safetensors(
    path: Path, names: Sequence[str], tensors: Callable[[], Iterable[Tensor]]
) -> None:
    """Writes CPU tensors under these names into one file, one tensor in memory at a time. tensors: returns them, again
    if the file has to be written again. Raises as write_durably does.

    The format is 8 bytes of header length, a JSON header, then the data. A tensor's entry in the header is not known
    until the tensor is read, so room is left for the header, and spaces fill what it does not need.
    """
    room = 256 + sum(len(name) + 256 for name in names)
    room -= room % 8  # the data begins at a multiple of 8

    def write(file: BinaryIO) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        file.seek(8 + room)
        for name, tensor in zip(names, tensors()):
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy())
            header[name] = asdict(HeaderEntry.of(tensor, position))
            position += tensor.nbytes
            progress.touch()
        file.seek(0)
        file.write(encode_header(header, room))

    write_durably(path, write)
