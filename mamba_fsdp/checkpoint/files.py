"""One rank's file: flat pieces of tensors in the safetensors format, written, flushed, and read back before it counts.

The format is 8 bytes of header length, a JSON header, then the data (github.com/huggingface/safetensors). A piece is
named `<tensor name>@<start>`: the elements of the flattened tensor from `start` on. The model's pieces come first: who
wants only these reads, and verifies, the first part of the file.

A second thread flushes and reads back what the first has written. Read from the disk, that proves that the disk gives
it back; from the kernel's memory, only that the kernel has taken it as it was.
"""

import contextlib
import json
import os
import resource
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from io import FileIO
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from typing import Any

import torch
import xxhash

from mamba_fsdp.conventions import SAFETENSORS_DTYPES
from mamba_fsdp.errors import UserError
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.storage import retry_io
from mamba_fsdp.untrusted import parse_object

NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
BLOCK = 1 << 24  # bytes that are written or read at a time
BROKEN = (
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
)  # what odd headers lead to
LONGEST_HEADER = 100_000_000  # bytes, as the format has it: what a damaged length says is not read
FLUSH = (
    1 << 28
)  # bytes that are flushed at a time: one flush of a whole file could look like a hang


class _Crc32:  # as versions 1 and 2 have it
    value = 0

    def update(self, data):
        self.value = zlib.crc32(data, self.value)

    def hexdigest(self):
        return f"{self.value:08x}"


HASHES = {"xxh3": xxhash.xxh3_64, "crc32": _Crc32}


def write_pieces(
    path: Path,
    pieces: Sequence[tuple[str, int, torch.Tensor]],
    model_pieces: int = 0,
    from_disk: bool = True,
) -> dict[str, Any]:
    """Write `pieces`, a list of (tensor name, start, 1-D CPU tensor), durably, and read them back, `from_disk` or not.

    Returns what `checksum` does, and as "model" the same of the file's first part: the header and the first
    `model_pieces`. Raises OSError as the disk does, and when what lies on it is not what was written.
    """
    header, position = {}, 0
    for name, start, tensor in pieces:
        header[f"{name}@{start}"] = {
            "dtype": NAMES[tensor.dtype],
            "shape": [tensor.numel()],
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    contents = [
        len(head).to_bytes(8, "little") + head,
        *(tensor.view(torch.uint8).numpy() for _, _, tensor in pieces),
    ]
    model_bytes = sum(len(content) for content in contents[: 1 + model_pieces])
    blocks = [
        memoryview(content)[at : at + BLOCK]
        for content in contents
        for at in range(0, len(content), BLOCK)
    ]
    written, read, size, flushed = HASHES["xxh3"](), HASHES["xxh3"](), 0, 0
    checks: list[AsyncResult[None]] = []  # at most one: so far may writing be ahead of flushing

    def flush_and_read(start, stop):
        if from_disk:
            _flush(file)
            _drop(file, start, stop)
        _update(read, back, stop - start)
        if not from_disk:
            _flush(file)

    # Over what an attempt that failed has left. Small blocks are gathered in the buffer, large ones pass it by.
    with (
        open(path, "wb", buffering=1 << 20) as file,
        open(path, "rb", buffering=0) as back,
        ThreadPool(1) as second,
    ):
        for block in blocks:
            file.write(block)
            _drop(file, size, size + len(block))
            written.update(block)
            size += len(block)
            heart.beat()
            if size == model_bytes:
                model = {"bytes": size, "xxh3": written.hexdigest()}
            if size - flushed >= FLUSH or block is blocks[-1]:
                file.flush()
                while checks:
                    checks.pop().get()
                checks.append(second.apply_async(flush_and_read, (flushed, size)))
                flushed = size
        checks.pop().get()
    if read.hexdigest() != written.hexdigest():
        raise OSError(None, "what was read back is not what was written", str(path))
    return {"bytes": size, "xxh3": written.hexdigest(), "model": model}


def _flush(file):
    os.fsync(file.fileno())


def _drop(file, start, stop):
    """Let the kernel begin to write this part of the file, and forget what is written of it, where it can do that."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), start, stop - start, os.POSIX_FADV_DONTNEED)


def checksum(
    path: Path, limit: int = sys.maxsize, kind: str = "xxh3", wanted: dict[str, Shard] | None = None
) -> dict[str, int | str]:
    """{"bytes": size, kind: checksum} of a file, or of its first `limit` bytes. Raises OSError. wanted: name -> shard,
    filled on the way with the elements of it that are read, which its `filled` then names."""
    found, size, at_once, pieces = (
        HASHES[kind](),
        0,
        min(BLOCK, 1 << 20),
        [],
    )  # a block stays in the processor's cache
    with FileIO(path) as file, contextlib.suppress(EOFError):
        with contextlib.suppress(
            *BROKEN
        ):  # nobody has verified the header yet: where it is odd, nothing is filled
            pieces = (
                [(wanted[name], *rest) for name, *rest in _pieces(file) if name in wanted]
                if wanted
                else []
            )
        file.seek(0)
        for shard, start, count, position, dtype in pieces:
            low, high = max(start, shard.start), min(start + count, shard.start + len(shard.data))
            position, bytes_ = (
                position + (low - start) * dtype.itemsize,
                (high - low) * dtype.itemsize,
            )
            if bytes_ > 0 and size <= position <= limit - bytes_:
                size += _update(found, file, position - size)
                for part in shard.data[low - shard.start : high - shard.start].split(
                    at_once // dtype.itemsize
                ):
                    block = (
                        part
                        if part.is_cpu and part.dtype == dtype
                        else torch.empty(part.shape, dtype=dtype)
                    )
                    found.update(_exactly(file, block.view(torch.uint8).numpy()))
                    part.copy_(block)
                size += bytes_
                shard.filled.add((path, start, low - start, high - low))
        size += _update(found, file, limit - size)
    return {"bytes": size, kind: found.hexdigest()}


def _update(found, file, limit):
    """Add up to `limit` bytes of the file, from where it stands, to the checksum. Returns how many there were."""
    size, block = 0, memoryview(bytearray(min(BLOCK, 1 << 20, limit)))
    while count := file.readinto(block[: limit - size]):
        found.update(block[:count])
        size += count
        heart.beat()
    return size


def _pieces(file):
    """(tensor's name, start, count, position in the file, dtype) of each piece. Raises BROKEN where its header is."""
    size, head = (
        os.fstat(file.fileno()).st_size,
        8 + int.from_bytes(_exactly(file, bytearray(8)), "little"),
    )
    if head > min(size, 8 + LONGEST_HEADER):
        raise EOFError
    for key, entry in parse_object(_exactly(file, bytearray(head - 8))).items():
        name, _, start = key.rpartition("@")
        (count,), position, dtype = (
            entry["shape"],
            head + entry["data_offsets"][0],
            SAFETENSORS_DTYPES[entry["dtype"]],
        )
        if (
            {type(count), type(position)} != {int}
            or count < 0
            or not head <= position <= size - count * dtype.itemsize
        ):
            raise ValueError
        yield name, int(start), count, position, dtype


class PieceReader:
    """Reads ranges of pieces from a checkpoint's files. Raises UserError with the file that is not as written.

    names: of all tensors. What lies where in a file is noted when it is first read. Since a checkpoint may have more
    files than a process may open, at most a quarter of these stay open.
    """

    def __init__(self, folder: Path, names: Iterable[str]):
        self.folder, self.numbers = folder, {name: number for number, name in enumerate(names)}
        self.most_open = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self.open_files: dict[str, FileIO] = {}  # the one read last comes last
        self.places: dict[
            str, array[int]
        ] = {}  # of a file: start, count and position of each tensor's piece

    def read(self, file: str, name: str, start: int, offset: int, target: torch.Tensor) -> None:
        """Fill `target`, a 1-D CPU tensor, with the elements from `offset` on of the piece `name`@`start`."""
        path = self.folder / file
        try:
            retry_io(lambda: self._read(path, name, start, offset, target), path)
        except OSError as error:
            raise UserError(f"can't read {path}: {error.strerror}") from None
        except BROKEN:
            raise UserError(
                f"{path} is broken: it is cut short, or its header is not what was written"
            ) from None

    def _read(self, path, name, start, offset, target):
        file, number = path.name, 3 * self.numbers[name]
        opened = self.open_files.pop(file, None) or open(
            path, "rb", buffering=0
        )  # anew where it could not be read
        if file not in self.places:
            self.places[file] = self._read_places(opened)
        there, count, position = self.places[file][number : number + 3]
        if there != start or offset + target.numel() > count:
            raise UserError(
                f"{path} is broken: it lacks the piece of {name} that starts at {start}"
            )
        opened.seek(position + offset * target.element_size())
        _exactly(opened, target.view(torch.uint8).numpy())
        self.open_files[file] = opened
        if len(self.open_files) > self.most_open:
            self.open_files.pop(next(iter(self.open_files))).close()

    def _read_places(self, opened):
        places = array(
            "q", bytes(24 * len(self.numbers))
        )  # far less than the header: there may be thousands of files
        for name, start, count, position, _ in _pieces(opened):
            places[3 * (number := self.numbers[name]) : 3 * number + 3] = array(
                "q", [start, count, position]
            )
        return places


def _exactly(file, buffer):
    """`buffer`, filled from where the file stands."""
    rest = memoryview(buffer)
    while len(rest):
        count = file.readinto(rest[:BLOCK])
        if not count:
            raise EOFError
        rest = rest[count:]
        heart.beat()
    return buffer
