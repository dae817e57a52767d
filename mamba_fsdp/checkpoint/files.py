"""Reads and writes the file of one rank: pieces of flattened tensors in the safetensors format.

A file in this format consists of the length of the header (8 bytes), the header as JSON, and the data; see
github.com/huggingface/safetensors. A piece is named `<tensor name>@<start>`, where `start` is the index of its first
element in the flattened tensor. The pieces of the model come first, so that a program that needs only the model reads
and verifies only the first part of the file.
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

from mamba_fsdp.checkpoint.contents import CORRUPTION_ERRORS, Checksum, FileChecksum
from mamba_fsdp.conventions import SAFETENSORS_DTYPES
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.storage.threads import in_thread
from mamba_fsdp.storage.typed_json import from_json, parse_object
from mamba_fsdp.this_process import progress

DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
WRITE_BLOCK_BYTES = 1 << 24
READ_BLOCK_BYTES = 1 << 20  # small enough to stay in the processor's cache
# Flush after this many bytes. While a whole large file is flushed, the watchdog would see no progress.
FLUSH_BYTES = 1 << 28
# (name of the tensor, index of the piece's first element in the flattened tensor, the piece as a 1-D tensor on the CPU)
NamedPiece = tuple[str, int, torch.Tensor]
MAX_HEADER_BYTES = 100_000_000  # the limit of the format; a damaged length can be larger


@dataclass
class HeaderEntry:
    """The entry of one tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]  # [first byte, byte after the last], counted from the end of the header

    @classmethod
    def of(cls, tensor: torch.Tensor, position: int) -> "HeaderEntry":
        """Returns the entry of `tensor`. position: the offset of its data from the end of the header."""
        offsets = [position, position + tensor.nbytes]
        return cls(DTYPE_NAMES[tensor.dtype], list(tensor.shape), offsets)


@dataclass(frozen=True)
class Piece:
    """A piece of a flattened tensor in a file."""

    name: str  # name of the tensor
    start: int  # index of the first element in the flattened tensor
    count: int  # number of elements
    position: int  # offset of the first byte in the file
    dtype: torch.dtype


def write_pieces(
    path: Path,
    pieces: Sequence[NamedPiece],
    model_pieces: int = 0,
    from_disk: bool = True,
) -> FileChecksum:
    """Writes `pieces` to a file, waits until they are on the disk, and reads them back. Returns the checksums.

    model_pieces: the number of pieces of the model. The header and these pieces get a checksum of their own. from_disk:
    whether to drop the file from the page cache, so that it is read back from the disk. Otherwise it is read back from
    the page cache while it is being flushed. That is faster, but does not verify the disk.

    Raises OSError if the disk fails, or if the data that is read back differs.
    """
    entries = {}
    position = 0
    for name, start, tensor in pieces:
        entries[f"{name}@{start}"] = asdict(HeaderEntry.of(tensor, position))
        position += tensor.nbytes
    contents = [memoryview(encode_header(entries))]
    contents += [memoryview(tensor.view(torch.uint8).numpy()) for _, _, tensor in pieces]
    written = xxh3_64()
    model = None
    with _CheckedFile(path, from_disk) as file:
        for number, content in enumerate(contents):
            for at in range(0, len(content), WRITE_BLOCK_BYTES):
                block = content[at : at + WRITE_BLOCK_BYTES]
                file.write(block)
                written.update(block)
            if number == model_pieces:
                model = Checksum(file.size, written.hexdigest())
        read_back = file.finish()
    if read_back != written.hexdigest():
        raise OSError(None, "the data read back differs from the data written", str(path))
    return FileChecksum(file.size, read_back, model)


def encode_header(entries: Mapping[str, Any], size: int = 0) -> bytes:
    """Returns the beginning of a safetensors file: the length of the header, then the header as JSON.

    entries: {name: HeaderEntry as a dict}. The header is padded with spaces to a multiple of 8 bytes, and to at least
    `size` bytes.
    """
    text = json.dumps(entries).encode().ljust(size)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _CheckedFile:
    """A file that a second thread flushes and reads back, FLUSH_BYTES at a time, while this thread writes more."""

    def __init__(self, path: Path, from_disk: bool) -> None:
        self.from_disk = from_disk
        self.size = 0
        self.flushed = 0
        self.read = xxh3_64()
        self.check: Future[None] | None = None  # the check of the last part
        # This overwrites the file of a failed attempt. The buffer of `open` combines small blocks.
        self.file = open(path, "wb")
        self.back = FileIO(path)

    def __enter__(self) -> "_CheckedFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.back.close()
        self.file.close()

    def write(self, block: memoryview) -> None:
        self.file.write(block)
        self._drop_from_cache(self.size, self.size + len(block))  # starts the write to the disk
        self.size += len(block)
        progress.touch()
        if self.size - self.flushed >= FLUSH_BYTES:
            self._begin_check()

    def finish(self) -> str:
        """Flushes and reads back the rest. Returns the checksum of the whole file."""
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
            self._drop_from_cache(start, stop)
        _hash_bytes(self.back, self.read, stop - start)
        if not self.from_disk:
            os.fsync(self.file.fileno())

    def _drop_from_cache(self, start: int, stop: int) -> None:
        """Advises the kernel, if it has posix_fadvise, to drop this part of the file from the page cache."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file.fileno(), start, stop - start, os.POSIX_FADV_DONTNEED)


FilledRanges = dict[str, list[tuple[int, int]]]  # {name: [(first element, element after the last)]}


@dataclass
class FileRead:
    """The result of reading a file, or its first part."""

    xxh3: str
    filled: FilledRanges  # the elements that were also copied into shards


def compute_checksum(path: Path) -> FileChecksum:
    """Reads a file, and returns its size and checksum. Raises OSError if it can't be read."""
    size = path.stat().st_size
    return FileChecksum(size, hash_file(path, size, {}).xxh3)


def hash_file(path: Path, end: int, shards: Mapping[str, Shard]) -> FileRead:
    """Reads the first `end` bytes of a file once, computes their checksum, and copies elements into shards.

    shards: {stored name: shard}. The elements of the shards that the file contains are copied into them. The header
    has not been verified at this point. If it can't be parsed, nothing is copied. The caller must use the copied
    elements only if the checksum is correct.

    Raises OSError if the file can't be read.
    """
    digest = xxh3_64()
    filled: FilledRanges = {}
    done = 0
    with FileIO(path) as file:
        pieces: list[Piece] = []
        if shards:
            with contextlib.suppress(*CORRUPTION_ERRORS):
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
            with contextlib.suppress(EOFError):  # the file was truncated while it was read
                target = shard.data[first - shard.start : stop - shard.start]
                _hash_into(file, digest, target, piece.dtype)
                filled.setdefault(piece.name, []).append((first, stop))
            done = position + size
        _hash_bytes(file, digest, end - done)
    return FileRead(digest.hexdigest(), filled)


def _hash_bytes(file: FileIO, digest: xxh3_64, limit: int) -> None:
    """Reads up to `limit` bytes from the file's current position, and adds them to the checksum."""
    block = memoryview(bytearray(min(READ_BLOCK_BYTES, limit)))
    while count := file.readinto(block[:limit]):
        digest.update(block[:count])
        limit -= count
        progress.touch()


def _hash_into(file: FileIO, digest: xxh3_64, target: torch.Tensor, dtype: torch.dtype) -> None:
    """Reads elements of `dtype` from the file's current position into `target`, and adds their bytes to the checksum.

    target: a 1-D tensor of any dtype on any device. Raises EOFError if the file ends too early.
    """
    for part in target.split(READ_BLOCK_BYTES // dtype.itemsize):
        block = part
        if not part.is_cpu or part.dtype != dtype:
            block = torch.empty(part.shape, dtype=dtype)
        data = read_exactly(file, block.view(torch.uint8).numpy())
        digest.update(data)
        part.copy_(block)


def read_header(file: FileIO) -> Iterator[Piece]:
    """Yields the pieces of a rank's file in their order. Raises one of CORRUPTION_ERRORS if the header is damaged."""
    length = int.from_bytes(read_exactly(file, bytearray(8)), "little")
    if length > min(MAX_HEADER_BYTES, os.fstat(file.fileno()).st_size):
        raise EOFError
    header = parse_object(read_exactly(file, bytearray(length)))
    for key, entry in from_json(dict[str, HeaderEntry], header).items():
        name, _, start = key.rpartition("@")
        (count,) = entry.shape
        position = 8 + length + entry.data_offsets[0]
        yield Piece(name, int(start), count, position, SAFETENSORS_DTYPES[entry.dtype])


def read_exactly(file: FileIO, buffer: Any) -> Any:
    """Fills the buffer from the file's current position, and returns it. Raises EOFError if the file ends too early."""
    rest = memoryview(buffer)
    while len(rest):
        count = file.readinto(rest[:WRITE_BLOCK_BYTES])
        if not count:
            raise EOFError
        rest = rest[count:]
        progress.touch()
    return buffer
