"""Arithmetic of ranges: who writes which elements, how that is told, and where the elements that a rank needs lie.

A layout is one way of cutting a flattened tensor: {"starts": where each piece starts, in elements, "files": the number
of the file that it is in}. Most tensors of a model are cut in one of a few ways.
"""

import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

Layout = dict[str, list[int]]
SMALLEST = 1 << 16  # elements; a smaller piece is not worth splitting


def part_to_write(count: int, replicas: int, replica_index: int, turn: int) -> tuple[int, int]:
    """The range (start, stop) of `count` elements that one of the ranks holding them writes: together, each once.

    `turn`, the tensor's number, lets tensors that few of the replicas write take turns among groups of so many.
    """
    writers = min(replicas, max(1, count // SMALLEST))
    mine = replica_index - turn % (replicas // writers) * writers
    if not 0 <= mine < writers:
        return 0, 0
    return count * mine // writers, count * (mine + 1) // writers


def packed(pieces: Sequence[tuple[int, int]]) -> bytes:
    """What a rank tells of its piece of each tensor, in the same order on all ranks: (start, count), 0 for none."""
    return zlib.compress(np.array(pieces, dtype="<i8").tobytes())


def find_layouts(
    told: Sequence[bytes], sizes: Sequence[int]
) -> tuple[list[Layout], list[int | None]]:
    """(the distinct layouts, for each tensor the number of its own), from what each rank told; None for a tensor whose
    pieces are not the whole of it. sizes: elements of each tensor. The file of a piece is the rank's number."""
    ranks = np.array(
        [np.frombuffer(zlib.decompress(pieces), dtype="<i8").reshape(-1, 2) for pieces in told]
    )
    layouts: list[Layout] = []
    number_of: dict[tuple[int, bytes], int | None] = {}
    numbers = []
    for size, pieces in zip(sizes, ranks.transpose(1, 0, 2)):
        key = size, pieces.tobytes()
        if key not in number_of:
            files = np.flatnonzero(pieces[:, 1])
            files = files[np.argsort(pieces[files, 0], kind="stable")]
            starts, counts = pieces[files].T.tolist()
            number_of[key] = len(layouts) if tiles(starts, counts, size) else None
            layouts.append({"starts": starts, "files": files.tolist()})
        numbers.append(number_of[key])
    return layouts, numbers


def overlaps(
    start: int, stop: int, starts: Sequence[int], size: int
) -> Iterator[tuple[int, int, int, int]]:
    """Where the elements [start, stop) lie: (number of a piece, offset in it, offset from `start`, count), in turn.

    starts: those of the pieces, which tile the `size` elements of the tensor.
    """
    for number in range(max(0, bisect_right(starts, start) - 1), len(starts)):
        end = starts[number + 1] if number + 1 < len(starts) else size
        low, high = max(start, starts[number]), min(stop, end)
        if low >= high:
            return
        yield number, low - starts[number], low - start, high - low


def tiles(starts: Sequence[int], counts: Sequence[int], size: int) -> bool:
    """Whether the sorted pieces cover [0, size) without gap or overlap."""
    return [*starts, size] == [0, *accumulate(counts)]


def is_cut(starts: Sequence[int], size: int) -> bool:
    """Whether pieces with these starts can be those of a tensor of `size` elements, none of them empty."""
    return [*starts, size] == sorted({0, *starts, size})
