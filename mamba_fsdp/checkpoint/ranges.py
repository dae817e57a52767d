"""Arithmetic of ranges: who writes which elements, and where the elements that a rank needs lie."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

SMALLEST = 1 << 16  # elements; a smaller piece is not worth splitting


def part_to_write(count: int, replicas: int, replica_index: int, turn: int) -> tuple[int, int]:
    """The range (start, stop) of `count` elements that one of the ranks holding them writes: together, each once.

    `turn`, the tensor's number, lets small tensors take turns among the replicas.
    """
    writers = min(replicas, max(1, count // SMALLEST))
    mine = (replica_index - turn) % replicas
    if mine >= writers:
        return 0, 0
    return count * mine // writers, count * (mine + 1) // writers


def overlaps(start: int, stop: int, pieces: Sequence[Sequence[int]]) -> Iterator[tuple[Sequence[int], int, int, int]]:
    """Where the elements [start, stop) lie: (piece, offset in it, offset from `start`, count) for each piece in turn.

    pieces: sorted lists [start, count, ...] that tile the tensor.
    """
    for piece in pieces:
        low, high = max(start, piece[0]), min(stop, piece[0] + piece[1])
        if low < high:
            yield piece, low - piece[0], low - start, high - low


def tiles(pieces: Sequence[Sequence[int]], count: int) -> bool:
    """Whether the sorted pieces cover [0, count) without gap or overlap."""
    return [*(piece[0] for piece in pieces), count] == [0, *accumulate(piece[1] for piece in pieces)]
