"""Reads and writes one rank's file: flat pieces of tensors in the safetensors format, flushed and read back before
they count.

The format is 8 bytes of header length, a JSON header, then the data (github.com/huggingface/safetensors). A piece is
named `<tensor name>@<start>`: the elements of the flattened tensor from `start` on. The model's pieces come first: a
reader that wants only these reads, and verifies, the first part of the file.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_64

from mamba_fsdp.checkpoint.contents import BAD_CONTENT, Checksum, FileChecksum
from mamba_fsdp.conventions import SAFETENSORS_DTYPES
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.storage.threads import in_thread
from mamba_fsdp.storage.typed_json import from_json, parse_object
from mamba_fsdp.this_process import progress

DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
BLOCK = 1 << 24  # bytes that are written at a time
READ_BLOCK = 1 << 20  # bytes that are read at a time: they stay in the processor's cache
# Bytes that are flushed at a time: one flush of a whole file could look like a hang.
FLUSH = 1 << 28
# The name of a tensor, a piece's first element in it, and the piece, 1-D on the CPU.
NamedPiece = tuple[str, int, torch.Tensor]
LONGEST_HEADER = 100_000_000  # bytes, as the format has it: a damaged length may ask for more


@dataclass
class HeaderEntry:
    """An entry in the header of a safetensors file, about one piece of a tensor."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]  # [first byte, byte after the last], counted from the end of the header

    @classmethod
    def of(cls, tensor: torch.Tensor, position: int) -> "HeaderEntry":
        """Returns the entry of a tensor whose data begins `position` bytes after the header."""
        offsets = [position, position + tensor.nbytes]
        return cls(DTYPE_NAMES[tensor.dtype], list(tensor.shape), offsets)


@dataclass(frozen=True)
class Piece:
    """A flat part of a tensor, as it lies in a file."""

    name: str  # of the tensor
    start: int  # its first element in the flattened tensor
    count: int  # elements
    position: int  # of its first byte in the file
    dtype: torch.dtype


def write_pieces(
    path: Path,
    pieces: Sequence[NamedPiece],
    model_pieces: int = 0,
    from_disk: bool = True,
) -> FileChecksum:
    """Writes `pieces`, 1-D tensors on the CPU, durably, and reads them back.

    from_disk: read back from the disk, which proves that the disk has the data; otherwise from the kernel's memory
    while the file is being flushed, which takes less time. Returns the checksum of the file, and that of its first
    part: the header and the first `model_pieces`. Raises OSError as the disk does, and if what is read back is not what
    was written.
    """
    contents = [memoryview(_header(pieces))]
    for _, _, tensor in pieces:
        contents.append(memoryview(tensor.view(torch.uint8).numpy()))
    written = xxh3_64()
    model = None
    with _CheckedFile(path, from_disk) as file:
        for number, content in enumerate(contents):
            for at in range(0, len(content), BLOCK):
                block = content[at : at + BLOCK]
                file.write(block)
                written.update(block)
            if number == model_pieces:
                model = Checksum(file.size, written.hexdigest())
        read_back = file.finish()
    if read_back != written.hexdigest():
        raise OSError(None, "what was read back is not what was written", str(path))
    return FileChecksum(file.size, read_back, model)


def _header(pieces: Sequence[NamedPiece]) -> bytes:
    entries = {}
    position = 0
    for name, start, tensor in pieces:
        entries[f"{name}@{start}"] = asdict(HeaderEntry.of(tensor, position))
        position += tensor.nbytes
    return encode_header(entries)


def encode_header(entries: Mapping[str, Any], size: int = 0) -> bytes:
    """Returns the beginning of a safetensors file: the length of the header, then the header as JSON.

    entries: {name: HeaderEntry as a dict}. The header is padded with spaces to a multiple of 8 bytes, and to at least
    `size` bytes.
    """
    text = json.dumps(entries).encode().ljust(size)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _CheckedFile:
    """A file that a second thread flushes and reads back, FLUSH bytes at a time, while more is being written."""

    def __init__(self, path: Path, from_disk: bool) -> None:
        self.from_disk = from_disk
        self.size = 0
        self.flushed = 0
        self.read = xxh3_64()
        self.check: Future[None] | None = None  # of the last part that was written
        # Overwrites what a failed attempt left. Its buffer gathers small blocks.
        self.file = open(path, "wb")
        self.back = FileIO(path)

    def __enter__(self) -> "_CheckedFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.back.close()
        self.file.close()

    def write(self, block: memoryview) -> None:
        self.file.write(block)
        self._forget(self.size, self.size + len(block))  # makes the kernel begin to write it
        self.size += len(block)
        progress.touch()
        if self.size - self.flushed >= FLUSH:
            self._begin_check()

    def finish(self) -> str:
        """Reads back what has not been read back yet. Returns the checksum of the whole file."""
        self._begin_check()
        self._end_check()
        return self.read.hexdigest()

    def _begin_check(self) -> None:
        self.file.flush()
        self._end_check()
        self.check = in_thread(self._flush_and_read, self.flushed, self.size)
        self.flushed = self.size

    def _end_check(self) -> None:
        if self.check:
            self.check.result()
            self.check = None

    def _flush_and_read(self, start: int, stop: int) -> None:
        if self.from_disk:
            os.fsync(self.file.fileno())
            self._forget(start, stop)
        _hash_bytes(self.back, self.read, stop - start)
        if not self.from_disk:
            os.fsync(self.file.fileno())

    def _forget(self, start: int, stop: int) -> None:
        """Tells the kernel, if it has such a call, that it may drop this part of the file from its cache."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file.fileno(), start, stop - start, os.POSIX_FADV_DONTNEED)


Filled = dict[str, list[tuple[int, int]]]  # name -> [(first element, the one after the last)]


@dataclass
class FileRead:
    """The result of reading a file, or its first part."""

    xxh3: str
    filled: Filled  # the elements that were also put into shards


def checksum_of(path: Path) -> FileChecksum:
    """Reads a file and returns its size and checksum. Raises OSError."""
    size = path.stat().st_size
    return FileChecksum(size, hash_file(path, size, {}).xxh3)


def hash_file(path: Path, end: int, shards: Mapping[str, Shard]) -> FileRead:
    """Reads the first `end` bytes of a file once, and computes their checksum. Raises OSError.

    shards: by the names of their tensors; they are filled with what the file holds of them, in the same pass. The
    header is not verified yet: if it can't be read, nothing is filled, and what is filled counts only if the checksum
    is right.
    """
    digest = xxh3_64()
    filled: Filled = {}
    done = 0
    with FileIO(path) as file:
        pieces: list[Piece] = []
        if shards:
            with contextlib.suppress(*BAD_CONTENT):
                pieces = [piece for piece in read_header(file) if piece.name in shards]
            file.seek(0)
        for piece in pieces:
            shard = shards[piece.name]
            first = max(piece.start, shard.start)
            stop = min(piece.start + piece.count, shard.start + len(shard.data))
            position = piece.position + (first - piece.start) * piece.dtype.itemsize
            size = (stop - first) * piece.dtype.itemsize
            if size <= 0 or position < done or position + size > end:
                continue
            _hash_bytes(file, digest, position - done)
            with contextlib.suppress(EOFError):  # the file was cut short while being read
                target = shard.data[first - shard.start : stop - shard.start]
                _hash_into(file, digest, target, piece.dtype)
                filled.setdefault(piece.name, []).append((first, stop))
            done = position + size
        _hash_bytes(file, digest, end - done)
    return FileRead(digest.hexdigest(), filled)


def _hash_bytes(file: FileIO, digest: xxh3_64, limit: int) -> None:
    """Adds up to `limit` bytes of the file, from its current position on, to the checksum."""
    block = memoryview(bytearray(min(READ_BLOCK, limit)))
    while count := file.readinto(block[:limit]):
        digest.update(block[:count])
        limit -= count
        progress.touch()


def _hash_into(file: FileIO, digest: xxh3_64, target: torch.Tensor, dtype: torch.dtype) -> None:
    """Fills `target`, a 1-D tensor on any device, with elements of `dtype` from the file's current position on, and adds
    them to the checksum."""
    for part in target.split(READ_BLOCK // dtype.itemsize):
        block = part
        if not part.is_cpu or part.dtype != dtype:
            block = torch.empty(part.shape, dtype=dtype)
        data = read_exactly(file, block.view(torch.uint8).numpy())
        digest.update(data)
        part.copy_(block)


def read_header(file: FileIO) -> Iterator[Piece]:
    """Yields the pieces in a rank's file, in their order. Raises one of BAD_CONTENT if it is not as it was written."""
    length = int.from_bytes(read_exactly(file, bytearray(8)), "little")
    if length > min(LONGEST_HEADER, os.fstat(file.fileno()).st_size):
        raise EOFError
    header = parse_object(read_exactly(file, bytearray(length)))
    for key, entry in from_json(dict[str, HeaderEntry], header).items():
        name, _, start = key.rpartition("@")
        (count,) = entry.shape
        position = 8 + length + entry.data_offsets[0]
        yield Piece(name, int(start), count, position, SAFETENSORS_DTYPES[entry.dtype])


def read_exactly(file: FileIO, buffer: Any) -> Any:
    """Fills the buffer from the file's current position on, and returns it. Raises EOFError."""
    rest = memoryview(buffer)
    while len(rest):
        count = file.readinto(rest[:BLOCK])
        if not count:
            raise EOFError
        rest = rest[count:]
        progress.touch()
    return buffer
