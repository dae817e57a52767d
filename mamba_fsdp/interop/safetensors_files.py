"""Reads and writes safetensors files with the names that transformers uses: model.safetensors, or several files with an index.
This module writes only the single file.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
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
    """The fields of the file INDEX that are used."""

    HAS_OTHER_FIELDS = True
    weight_map: dict[str, FileName]  # {parameter name: its file}


class SafetensorsTensors(TensorSource):
    """The tensors of the model in a safetensors file, or in all files of an index."""

    def __init__(self, path: Path):
        """Opens a file, or the files of an index. Raises UserError if a file is missing or damaged."""
        self.source = path
        files_by_name: dict[str, FileName] = {}
        if path.name == INDEX:
            index = read_object(path, Index, "copy or download it again")
            files_by_name = index.weight_map
        opened: dict[str, Any] = {}  # {stored name: the opened file that contains the tensor}
        for file_name in dict.fromkeys(files_by_name.values()) or [path.name]:
            file = _open(path.parent / file_name)
            opened |= dict.fromkeys(file.keys(), file)
        for name, file_name in files_by_name.items():
            if name not in opened:
                raise UserError(
                    f"{path.parent / file_name} lacks {name}, which {INDEX} lists in this file; copy or download the file again"
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
        return retry_io(map_tensors, path, path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing, but listed in {INDEX}; copy or download it") from None
    except OSError as error:
        raise storage_error(error, f"can't read {path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise UserError(
            f"{path} ({size_of(path):,} bytes) is incomplete or damaged ({error}); copy or "
            "download it again"
        ) from None


def map_tensors(path: Path) -> Any:
    """Opens a safetensors file, with its tensors mapped into memory. Raises OSError if it can't be read, and SafetensorError
    if it is damaged."""
    # This raises the actual error; safe_open reports "no such file" for all errors.
    open_to_read(path).close()
    try:
        return safe_open(path, framework="pt")
    except RuntimeError as error:
        raise parse_os_error(error) or error from None


def write_safetensors(
    path: Path, names: Sequence[str], tensors: Callable[[], Iterable[Tensor]]
) -> None:
    """Writes CPU tensors into one file, with one tensor in memory at a time.

    names: the names of the tensors. tensors: returns the tensors in the same order; it is called again if writing is retried.
    Raises StorageError after a minute of retries, and other OSErrors immediately.

    The file consists of 8 bytes with the length of the header, a JSON header, and the data. The entry of a tensor in the header
    is only known after the tensor has been read. Therefore space is reserved for the header, and the header is padded with
    spaces to this size.
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
