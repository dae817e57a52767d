import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mamba_fsdp.checkpoint import ranges

COUNTS = st.one_of(st.integers(0, 40), st.integers(0, 5 * ranges.SMALLEST))


@given(COUNTS, st.integers(1, 9), st.integers(0, 50))
def test_replicas_together_write_every_element_once(count, replicas, turn):
    """The ranges of all replicas tile the shard, and no piece that was split is tiny."""
    pieces = [ranges.part_to_write(count, replicas, index, turn) for index in range(replicas)]
    pieces = sorted((start, stop - start) for start, stop in pieces if start < stop)
    assert ranges.tiles([start for start, _ in pieces], [length for _, length in pieces], count)
    assert len(pieces) <= 1 or all(length >= ranges.SMALLEST for _, length in pieces)


@given(st.integers(1, 9), st.integers(0, 50))
def test_small_tensors_take_turns(replicas, first):
    """Of as many small tensors as there are replicas, each replica writes one."""
    writers = [
        index
        for turn in range(first, first + replicas)
        for index in range(replicas)
        if ranges.part_to_write(10, replicas, index, turn) == (0, 10)
    ]
    assert sorted(writers) == list(range(replicas))


def starts_of(lengths):
    return [sum(lengths[:number]) for number in range(len(lengths))]


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(0, 80), st.integers(0, 80))
def test_any_range_is_put_together_from_any_cut(lengths, start, length):
    """Reading [start, stop) from pieces gives what slicing the whole gives, in order and without gap."""
    whole, starts = torch.arange(sum(lengths)), starts_of(lengths)
    stop = min(start + length, len(whole))
    assert ranges.tiles(starts, lengths, len(whole)) and ranges.is_cut(starts, len(whole))
    expected = whole[start:stop] if start < stop else whole[:0]
    got, offset = [], 0
    for part in ranges.overlaps(start, stop, starts, len(whole)):
        assert part.at == offset and part.offset + part.count <= lengths[part.piece]
        offset += part.count
        first = starts[part.piece] + part.offset
        got.append(whole[first : first + part.count])
    assert torch.equal(torch.cat([whole[:0], *got]), expected)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_gaps_and_overlaps_are_noticed(lengths, data):
    """Pieces that don't tile the tensor are never taken for the whole."""
    starts, counts, size = starts_of(lengths), list(lengths), sum(lengths)
    broken = data.draw(st.integers(0, len(starts) - 1))
    if data.draw(st.booleans()):
        del starts[broken], counts[broken]
    else:
        counts[broken] += data.draw(st.sampled_from([-1, 1]))
    assert not ranges.tiles(starts, counts, size)


@pytest.mark.parametrize(
    "starts, size", [([1], 4), ([0, 4], 4), ([0, 2, 2], 4), ([0, 3, 2], 4), ([], 4), ([0], 0)]
)
def test_starts_that_cut_no_tensor_are_noticed(starts, size):
    assert not ranges.is_cut(starts, size)
