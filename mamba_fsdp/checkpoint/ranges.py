"""Computes which elements of a tensor each rank writes, and finds the pieces that contain a given range."""

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

MIN_PIECE_SIZE = 1 << 16  # elements; splitting a tensor into smaller pieces is not worthwhile


@dataclass
class TensorRanges:
    """The pieces into which a flattened tensor is divided. Many tensors of a model are divided in the same way."""

    starts: list[int]  # index of the first element of each piece
    files: list[int]  # index in Contents.files of the file with each piece


def range_to_write(count: int, replicas: int, replica_index: int, turn: int) -> tuple[int, int]:
    """Returns the range (start, stop) of the `count` elements of a shard that this replica writes.

    Together, the replicas write each element once. replicas: how many ranks have this shard. replica_index: the index
    of this rank among them. turn: the index of the tensor. Small tensors are written by some of the replicas only, and
    `turn` distributes such tensors over all replicas.
    """
    writers = min(replicas, max(1, count // MIN_PIECE_SIZE))
    groups = replicas // writers
    mine = replica_index - turn % groups * writers
    if not 0 <= mine < writers:
        return 0, 0
    return count * mine // writers, count * (mine + 1) // writers


def pack_ranges(pieces: Sequence[tuple[int, int]]) -> bytes:
    """Encodes a rank's piece of each tensor, (start, count), as bytes to send to rank 0.

    The order of the tensors is the same on all ranks. If a rank does not write a tensor, its count is 0.
    """
    return zlib.compress(np.array(pieces, dtype="<i8").tobytes())


def find_ranges(
    packed: Sequence[bytes], sizes: Sequence[int]
) -> tuple[list[TensorRanges], list[int]]:
    """Returns (list of distinct TensorRanges, index into this list for each tensor).

    packed: the result of `pack_ranges` on each rank. sizes: the number of elements of each tensor. The index of a file
    is the rank that wrote it. Raises ValueError if the pieces of a tensor do not cover it.
    """
    by_rank = [np.frombuffer(zlib.decompress(sent), dtype="<i8").reshape(-1, 2) for sent in packed]
    by_tensor = np.array(by_rank).transpose(1, 0, 2)  # shape (tensors, ranks, 2)
    ways: list[TensorRanges] = []
    number_of_way: dict[tuple[int, bytes], int] = {}
    numbers = []
    for tensor, (size, pieces) in enumerate(zip(sizes, by_tensor)):
        key = (size, pieces.tobytes())
        if key not in number_of_way:
            ranks = np.flatnonzero(pieces[:, 1])
            ranks = ranks[np.argsort(pieces[ranks, 0], kind="stable")]
            starts = pieces[ranks, 0].tolist()
            if not covers_exactly(starts, pieces[ranks, 1].tolist(), size):
                raise ValueError(f"the ranks did not write the whole of tensor {tensor}")
            number_of_way[key] = len(ways)
            ways.append(TensorRanges(starts, ranks.tolist()))
        numbers.append(number_of_way[key])
    return ways, numbers


@dataclass(frozen=True)
class Overlap:
    """The elements of a range that are stored in one piece."""

    piece: int  # index of the piece
    offset: int  # index of the first of these elements in the piece
    at: int  # index of the same element in the range
    count: int


def find_overlaps(start: int, stop: int, starts: Sequence[int], size: int) -> Iterator[Overlap]:
    """Yields the pieces with the elements [start, stop) of a tensor, in order.

    starts: the index of the first element of each piece. size: the number of elements of the tensor.
    """
    for piece in range(max(0, bisect_right(starts, start) - 1), len(starts)):
        end = starts[piece + 1] if piece + 1 < len(starts) else size
        low = max(start, starts[piece])
        high = min(stop, end)
        if low >= high:
            return
        yield Overlap(piece, low - starts[piece], low - start, high - low)


def find_gaps(start: int, stop: int, done: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields the parts of [start, stop) that are not covered by the ranges in `done`, in order."""
    for first, end in sorted(done):
        if start < first:
            yield start, first
        start = max(start, end)
    if start < stop:
        yield start, stop


def covers_exactly(starts: Sequence[int], counts: Sequence[int], size: int) -> bool:
    """Returns whether the pieces, sorted by start, cover [0, size) without gaps and overlaps."""
    return [*starts, size] == [0, *accumulate(counts)]


def is_partition(starts: Sequence[int], size: int) -> bool:
    """Returns whether pieces with these starts divide a tensor of `size` elements, and none of them is empty."""
    return [*starts, size] == sorted({0, *starts, size})
