"""Tests mamba_fsdp.checkpoint.ranges, which divides tensors among the ranks that write them, and finds the pieces that
contain a range of elements."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mamba_fsdp.checkpoint import ranges

COUNTS = st.one_of(st.integers(0, 40), st.integers(0, 5 * ranges.MIN_PIECE_SIZE))


@given(COUNTS, st.integers(1, 9), st.integers(0, 50))
def test_replicas_together_write_every_element_once(count, replicas, turn):
    """The ranges of all replicas together cover a shard exactly. No piece is smaller than MIN_PIECE_SIZE, unless it is
    the whole shard."""
    pieces = [ranges.range_to_write(count, replicas, index, turn) for index in range(replicas)]
    pieces = sorted((start, stop - start) for start, stop in pieces if start < stop)
    assert ranges.covers_exactly(
        [start for start, _ in pieces], [length for _, length in pieces], count
    )
    assert len(pieces) <= 1 or all(length >= ranges.MIN_PIECE_SIZE for _, length in pieces)


@given(st.integers(1, 9), st.integers(0, 50))
def test_small_tensors_are_distributed_evenly(replicas, first):
    """Small tensors are distributed evenly: of as many small tensors as there are replicas, each replica writes
    one."""
    writers = [
        index
        for turn in range(first, first + replicas)
        for index in range(replicas)
        if ranges.range_to_write(10, replicas, index, turn) == (0, 10)
    ]
    assert sorted(writers) == list(range(replicas))


CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=8)  # the lengths of a tensor's pieces


def starts_of(lengths):
    return [0, *accumulate(lengths[:-1])]


@given(CUTS, st.integers(0, 80), st.integers(0, 80))
def test_find_overlaps_finds_the_pieces_of_a_range(lengths, start, length):
    """find_overlaps finds the pieces that a range consists of, wherever the tensor was divided."""
    starts = starts_of(lengths)
    whole = torch.arange(sum(lengths))
    assert ranges.is_partition(starts, len(whole))
    stop = min(start + length, len(whole))
    found = torch.full_like(whole[start:stop], -1)
    for part in ranges.find_overlaps(start, stop, starts, len(whole)):
        assert 0 < part.count <= lengths[part.piece] - part.offset
        first = starts[part.piece] + part.offset
        found[part.at : part.at + part.count] = whole[first : first + part.count]
    assert torch.equal(found, whole[start:stop])


@given(CUTS, st.randoms())
def test_find_gaps_returns_the_uncovered_parts_of_a_range(lengths, chance):
    """find_gaps returns exactly the parts of a range that the given ranges do not cover, in whatever order they are
    given."""
    pieces = list(zip(starts_of(lengths), lengths))
    done = [(start, start + length) for start, length in pieces if chance.randrange(2)]
    chance.shuffle(done)
    filled = torch.zeros(sum(lengths))
    for start, stop in [*done, *ranges.find_gaps(0, len(filled), done)]:
        filled[start:stop] += 1
    assert torch.equal(filled, torch.ones(len(filled)))


@given(st.lists(CUTS, min_size=1, max_size=5), st.randoms())
def test_ranks_tell_in_any_order_how_every_tensor_was_cut(cuts, chance):
    """find_ranges returns the pieces of each tensor, in whatever order the ranks wrote them.

    Tensors with equal pieces share an entry, a rank without a piece is not listed in it, and a missing piece is an
    error.
    """
    pieces = np.zeros((8, len(cuts), 2), dtype=np.int64)  # (start, count) by rank and tensor
    expected = []
    for number, lengths in enumerate(cuts):
        writers = chance.sample(range(8), len(lengths))
        pieces[writers, number] = list(zip(starts_of(lengths), lengths))
        expected.append(ranges.TensorRanges(starts_of(lengths), writers))
    sizes = [sum(lengths) for lengths in cuts]
    packed = [ranges.pack_ranges(np.concatenate([mine, mine])) for mine in pieces]
    ways, numbers = ranges.find_ranges(packed, sizes * 2)
    assert [ways[number] for number in numbers] == expected * 2
    assert len(ways) == len(set(numbers)) <= len(cuts)
    pieces[expected[0].files[0], 0, 1] = 0
    with pytest.raises(ValueError, match="did not write the whole of tensor 0"):
        ranges.find_ranges([ranges.pack_ranges(mine) for mine in pieces], sizes)


@pytest.mark.parametrize("starts, counts", [([0], [3]), ([0], [5]), ([1], [3]), ([0, 2], [3, 2])])
def test_gaps_and_overlaps_are_noticed(starts, counts):
    """covers_exactly is False if the pieces of a tensor of 4 elements have a gap, overlap or exceed it."""
    assert not ranges.covers_exactly(starts, counts, 4)


@pytest.mark.parametrize("starts", [[1], [0, 4], [0, 2, 2], [0, 3, 2], []])
def test_invalid_starts_of_pieces_are_rejected(starts):
    assert not ranges.is_partition(starts, 4) and not ranges.is_partition([0], 0)
