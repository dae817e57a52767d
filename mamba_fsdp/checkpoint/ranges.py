"""Computes which rank writes which elements of a tensor, and where the elements that a rank needs lie."""

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

SMALLEST = 1 << 16  # elements; a smaller piece is not worth splitting


@dataclass
class TensorRanges:
    """One way of cutting a flattened tensor into pieces. Most tensors of a model are cut in one of a few ways."""

    starts: list[int]  # of the pieces, in elements
    files: list[int]  # for each piece, the number of the file that it is in


def part_to_write(count: int, replicas: int, replica_index: int, turn: int) -> tuple[int, int]:
    """Returns the range (start, stop) of `count` elements that one of the ranks which hold them writes. Together the
    ranks write each element once.

    turn: the tensor's number. If fewer ranks write a tensor than hold it, each such tensor goes to the next ranks in
    turn.
    """
    writers = min(replicas, max(1, count // SMALLEST))
    groups = replicas // writers
    mine = replica_index - turn % groups * writers
    if not 0 <= mine < writers:
        return 0, 0
    return count * mine // writers, count * (mine + 1) // writers


def pack(pieces: Sequence[tuple[int, int]]) -> bytes:
    """Returns a rank's piece of each tensor, (start, count), as bytes to send. The tensors' order is the same on all
    ranks, and a rank without a piece has count 0."""
    return zlib.compress(np.array(pieces, dtype="<i8").tobytes())


def find_ranges(
    packed: Sequence[bytes], sizes: Sequence[int]
) -> tuple[list[TensorRanges], list[int]]:
    """Returns (the ways in which tensors are cut, for each tensor the number of its way), from each rank's `pack`.

    sizes: elements of each tensor. The file of a piece is the rank's number. Raises ValueError if the pieces do not
    make up a tensor.
    """
    by_rank = [np.frombuffer(zlib.decompress(sent), dtype="<i8").reshape(-1, 2) for sent in packed]
    by_tensor = np.array(by_rank).transpose(1, 0, 2)  # (tensors, ranks, 2)
    ways: list[TensorRanges] = []
    number_of_way: dict[tuple[int, bytes], int] = {}
    numbers = []
    for tensor, (size, pieces) in enumerate(zip(sizes, by_tensor)):
        key = (size, pieces.tobytes())
        if key not in number_of_way:
            ranks = np.flatnonzero(pieces[:, 1])
            ranks = ranks[np.argsort(pieces[ranks, 0], kind="stable")]
            starts = pieces[ranks, 0].tolist()
            if not tiles(starts, pieces[ranks, 1].tolist(), size):
                raise ValueError(f"the ranks did not write the whole of tensor {tensor}")
            number_of_way[key] = len(ways)
            ways.append(TensorRanges(starts, ranks.tolist()))
        numbers.append(number_of_way[key])
    return ways, numbers


@dataclass(frozen=True)
class Overlap:
    """The elements of a range that one piece holds."""

    piece: int  # its number
    offset: int  # in the piece, of the first such element
    at: int  # in the range, of the same element
    count: int


def overlaps(start: int, stop: int, starts: Sequence[int], size: int) -> Iterator[Overlap]:
    """Yields where the elements [start, stop) lie, in their order.

    starts: of the pieces, which tile the `size` elements of the tensor.
    """
    for piece in range(max(0, bisect_right(starts, start) - 1), len(starts)):
        end = starts[piece + 1] if piece + 1 < len(starts) else size
        low = max(start, starts[piece])
        high = min(stop, end)
        if low >= high:
            return
        yield Overlap(piece, low - starts[piece], low - start, high - low)


def gaps(start: int, stop: int, done: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields the parts of [start, stop) that none of the ranges in `done` holds, in their order."""
    for first, end in sorted(done):
        if start < first:
            yield start, first
        start = max(start, end)
    if start < stop:
        yield start, stop


def tiles(starts: Sequence[int], counts: Sequence[int], size: int) -> bool:
    """Returns whether the sorted pieces cover [0, size) without gap or overlap."""
    return [*starts, size] == [0, *accumulate(counts)]


def is_cut(starts: Sequence[int], size: int) -> bool:
    """Returns whether a tensor of `size` elements can be cut at these starts, with no piece empty."""
    return [*starts, size] == sorted({0, *starts, size})
