"""Arithmetic of ranges: who writes which elements, how that is told, and where the elements that a rank needs lie.

A layout is one way of cutting a flattened tensor: {"starts": where each piece starts, in elements, "files": the number
of the file that it is in}. Most tensors of a model are cut in one of a few ways.
"""

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

Layout = dict[str, list[int]]
SMALLEST = 1 << 16  # elements; a smaller piece is not worth splitting


def part_to_write(count: int, replicas: int, replica_index: int, turn: int) -> tuple[int, int]:
    """The range (start, stop) of `count` elements that one of the ranks holding them writes: together, each once.

    `turn`, the tensor's number, lets tensors that few of the replicas write take turns among groups of so many.
    """
    writers = min(replicas, max(1, count // SMALLEST))
    groups = replicas // writers
    mine = replica_index - turn % groups * writers
    if not 0 <= mine < writers:
        return 0, 0
    return count * mine // writers, count * (mine + 1) // writers


def pack(pieces: Sequence[tuple[int, int]]) -> bytes:
    """What a rank tells of its piece of each tensor, in the same order on all ranks: (start, count), 0 for none."""
    return zlib.compress(np.array(pieces, dtype="<i8").tobytes())


def find_layouts(packed: Sequence[bytes], sizes: Sequence[int]) -> tuple[list[Layout], list[int]]:
    """(the distinct layouts, for each tensor the number of its own), from what each rank has packed.

    sizes: elements of each tensor. The file of a piece is the rank's number. Raises ValueError for
    pieces that are not the whole of a tensor.
    """
    told = [np.frombuffer(zlib.decompress(pieces), dtype="<i8").reshape(-1, 2) for pieces in packed]
    by_tensor = np.array(told).transpose(1, 0, 2)  # (tensors, ranks, 2)
    layouts: list[Layout] = []
    known: dict[tuple[int, bytes], int] = {}
    numbers = []
    for tensor, (size, pieces) in enumerate(zip(sizes, by_tensor)):
        key = (size, pieces.tobytes())
        if key not in known:
            ranks = np.flatnonzero(pieces[:, 1])
            ranks = ranks[np.argsort(pieces[ranks, 0], kind="stable")]
            starts = pieces[ranks, 0].tolist()
            if not tiles(starts, pieces[ranks, 1].tolist(), size):
                raise ValueError(f"the ranks did not write the whole of tensor {tensor}")
            known[key] = len(layouts)
            layouts.append({"starts": starts, "files": ranks.tolist()})
        numbers.append(known[key])
    return layouts, numbers


@dataclass(frozen=True)
class Overlap:
    """What a piece holds of a range of elements."""

    piece: int  # its number
    offset: int  # of the first such element in the piece
    at: int  # of the same in the range
    count: int


def overlaps(start: int, stop: int, starts: Sequence[int], size: int) -> Iterator[Overlap]:
    """Where the elements [start, stop) lie, in turn.

    starts: those of the pieces, which tile the `size` elements of the tensor.
    """
    for piece in range(max(0, bisect_right(starts, start) - 1), len(starts)):
        end = starts[piece + 1] if piece + 1 < len(starts) else size
        low = max(start, starts[piece])
        high = min(stop, end)
        if low >= high:
            return
        yield Overlap(piece, low - starts[piece], low - start, high - low)


def gaps(start: int, stop: int, done: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of [start, stop) that none of the ranges in `done` holds, in turn."""
    for first, end in sorted(done):
        if start < first:
            yield start, first
        start = max(start, end)
    if start < stop:
        yield start, stop


def tiles(starts: Sequence[int], counts: Sequence[int], size: int) -> bool:
    """Whether the sorted pieces cover [0, size) without gap or overlap."""
    return [*starts, size] == [0, *accumulate(counts)]


def is_cut(starts: Sequence[int], size: int) -> bool:
    """Whether pieces with these starts can be those of a tensor of `size` elements, none of them empty."""
    return [*starts, size] == sorted({0, *starts, size})
