"""One rank's file: flat pieces of tensors in the safetensors format, written, flushed, and read back before it counts.

The format is 8 bytes of header length, a JSON header, then the data (github.com/huggingface/safetensors). A piece is
named `<tensor name>@<start>`: the elements of the flattened tensor from `start` on.
"""

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch

from mamba_fsdp.conventions import SAFETENSORS_DTYPES
from mamba_fsdp.errors import UserError
from mamba_fsdp.heartbeat import heart

NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
BLOCK = 1 << 24  # bytes that are written or read at a time
FLUSH = 1 << 28  # bytes that are flushed at a time: one flush of a whole file could look like a hang


def write_pieces(path: Path, pieces: Sequence[tuple[str, int, torch.Tensor]]) -> dict[str, int | str]:
    """Write `pieces`, a list of (tensor name, start, 1-D CPU tensor), durably. Returns what `checksum` does.

    Raises OSError as the disk does, and when what lies on it is not what was written.
    """
    header, position = {}, 0
    for name, start, tensor in pieces:
        header[f"{name}@{start}"] = {"dtype": NAMES[tensor.dtype], "shape": [tensor.numel()],
                                     "data_offsets": [position, position + tensor.nbytes]}
        position += tensor.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    contents = [tensor.view(torch.uint8).numpy() for _, _, tensor in pieces]
    crc = unflushed = 0
    with open(path, "xb") as file:
        for data in (len(head).to_bytes(8, "little"), head, *contents):
            data = memoryview(data)
            for offset in range(0, len(data), BLOCK):
                block = data[offset:offset + BLOCK]
                file.write(block)
                crc = zlib.crc32(block, crc)
                unflushed += len(block)
                if unflushed >= FLUSH:
                    _flush(file)
                    unflushed = 0
                heart.beat()
        _flush(file)
        if hasattr(os, "posix_fadvise"):  # let the check read the disk rather than the memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    written: dict[str, int | str] = {"bytes": 8 + len(head) + position, "crc32": f"{crc:08x}"}
    if checksum(path) != written:
        raise OSError(None, "what was read back is not what was written", str(path))
    return written


def _flush(file):
    file.flush()
    os.fsync(file.fileno())


def checksum(path: Path) -> dict[str, int | str]:
    """{"bytes": size, "crc32": checksum} of a file. Raises OSError."""
    crc, size, block = 0, 0, bytearray(BLOCK)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            crc, size = zlib.crc32(memoryview(block)[:count], crc), size + count
            heart.beat()
    return {"bytes": size, "crc32": f"{crc:08x}"}


class PieceReader:
    """Reads ranges of the pieces in one file. Raises UserError, naming the file, where it is not as written."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.file = open(path, "rb")
            self.data_start = 8 + int.from_bytes(self._exactly(bytearray(8)), "little")
            if self.data_start > os.path.getsize(path):
                raise UserError(f"{path} is broken: its header is longer than the file")
            self.header = json.loads(self._exactly(bytearray(self.data_start - 8)))
        except OSError as error:
            raise UserError(f"can't read {path}: {error.strerror}") from None
        except ValueError:
            raise UserError(f"{path} is broken: its header is no JSON") from None

    def read(self, name: str, start: int, offset: int, count: int) -> torch.Tensor:
        """`count` elements from `offset` on of the piece `name`@`start`, as a 1-D CPU tensor."""
        entry = self.header.get(f"{name}@{start}")
        if entry is None:
            raise UserError(f"{self.path} is broken: it lacks the piece of {name} that starts at {start}")
        tensor = torch.empty(count, dtype=SAFETENSORS_DTYPES[entry["dtype"]])
        self.file.seek(self.data_start + entry["data_offsets"][0] + offset * tensor.element_size())
        self._exactly(tensor.view(torch.uint8).numpy())
        return tensor

    def _exactly(self, buffer):
        view = memoryview(buffer)
        try:
            for offset in range(0, len(view), BLOCK):
                block = view[offset:offset + BLOCK]
                if self.file.readinto(block) != len(block):
                    raise UserError(f"{self.path} is broken: it ends too early")
                heart.beat()
        except OSError as error:
            raise UserError(f"can't read {self.path}: {error.strerror}") from None
        return buffer
