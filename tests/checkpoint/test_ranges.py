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
    assert ranges.tiles(pieces, count)
    assert len(pieces) <= 1 or all(length >= ranges.SMALLEST for _, length in pieces)


@given(st.integers(1, 9), st.integers(0, 50))
def test_small_tensors_take_turns(replicas, first):
    """Of as many small tensors as there are replicas, each replica writes one."""
    writers = [index for turn in range(first, first + replicas) for index in range(replicas)
               if ranges.part_to_write(10, replicas, index, turn) == (0, 10)]
    assert sorted(writers) == list(range(replicas))


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(0, 80), st.integers(0, 80))
def test_any_range_is_put_together_from_any_cut(lengths, start, length):
    """Reading [start, stop) from pieces gives what slicing the whole gives, in order and without gap."""
    whole = torch.arange(sum(lengths))
    stop = min(start + length, len(whole))
    pieces, position = [], 0
    for count in lengths:
        pieces.append([position, count])
        position += count
    assert ranges.tiles(pieces, len(whole))
    expected = whole[start:stop] if start < stop else whole[:0]
    got, offset = [], 0
    for piece, inside, at, count in ranges.overlaps(start, stop, pieces):
        assert at == offset
        offset += count
        got.append(whole[piece[0]:piece[0] + piece[1]][inside:inside + count])
    assert torch.equal(torch.cat([whole[:0], *got]), expected)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_gaps_and_overlaps_are_noticed(lengths, data):
    """Pieces that don't tile the tensor are never taken for the whole."""
    pieces, position = [], 0
    for count in lengths:
        pieces.append([position, count])
        position += count
    broken = data.draw(st.integers(0, len(pieces) - 1))
    if data.draw(st.booleans()):
        del pieces[broken]
    else:
        pieces[broken][1] += data.draw(st.sampled_from([-1, 1]))
    assert not ranges.tiles(pieces, position)
