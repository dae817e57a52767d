"""Tests mamba_fsdp.data.sampler: each epoch contains every window once, sources are drawn according to their weights,
and a saved position remains valid unless the data changes."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_fsdp.data import sampler as order_module
from mamba_fsdp.data.sampler import Sampler, progress_by_source
from mamba_fsdp.errors import UserError


def source(token_count, identity="x"):
    return SimpleNamespace(token_count=token_count, identity=identity)


def with_windows(*counts, seq_length=8):
    return {f"s{i}": source(count * seq_length + 1, f"s{i}") for i, count in enumerate(counts)}


def draws_of(order, samples):
    """Returns {name of a source: its windows in the order in which they are drawn} of the first `samples` samples."""
    index, window = order.samples(0, samples)
    return {name: window[index == i].tolist() for i, name in enumerate(order.names)}


@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(1, 400), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
    block_tokens=st.integers(1, 99),
)
def test_every_window_of_every_source_once_an_epoch(counts, weights, seed, block_tokens):
    with patch.object(order_module, "BLOCK_TOKENS", block_tokens):
        sources = with_windows(*counts)
        order = Sampler(sources, dict(zip(sources, weights)), 8, seed)
        draws = draws_of(order, 2000)
    for name, count in zip(order.names, counts):
        for epoch in range(len(draws[name]) // count):
            assert sorted(draws[name][epoch * count : (epoch + 1) * count]) == list(range(count))


def test_samples_follow_the_weights_to_one_part_in_ten_thousand():
    shares = {"code": 0.4108, "text": 0.5892 - 0.0007, "rare": 0.0007}
    order = Sampler({name: source(10**6, name) for name in shares}, shares, 8, 0)
    index, _ = order.samples(0, 1_000_000)
    for i, name in enumerate(order.names):
        assert abs((index == i).mean() - shares[name]) < 1e-4
    drawn = order.state_after(10**12)["drawn"]
    assert all(abs(drawn[name] / 10**12 - shares[name]) < 1e-4 for name in shares)


def test_after_a_changed_mixture_each_source_continues_its_own_order():
    """If the weights of sources change, or sources are added, removed and added again, each source continues its own
    order: no window is repeated or left out in an epoch."""
    sources = with_windows(400, 300, 200)
    drawn = {name: [] for name in sources}
    state = None
    for weights in (
        {"s0": 1, "s1": 1},
        {"s0": 1, "s1": 5, "s2": 2},
        {"s0": 1, "s2": 2},
        {"s0": 0, "s1": 1, "s2": 1},
    ):
        order = Sampler({name: sources[name] for name in weights}, weights, 8, 0, state)
        for name, windows in draws_of(order, 100).items():
            drawn[name] += windows
        state = order.state_after(100)
        assert {name: len(windows) for name, windows in drawn.items() if windows} == state["drawn"]
    for name, windows in drawn.items():
        alone = Sampler({name: sources[name]}, {name: 1}, 8, 0)
        assert windows == draws_of(alone, len(windows))[name]


def test_a_position_of_other_data_is_refused():
    """A saved position is refused if the seed, the window length or the content of a source has changed, because the
    samples that were already drawn would be other windows."""
    sources = with_windows(40, 40)
    weights = {"s0": 1, "s1": 1}
    other = {**sources, "s1": source(321, "new")}
    state = Sampler(sources, weights, 8, 0).state_after(10)
    later = Sampler({"s0": sources["s0"]}, {"s0": 1}, 8, 0, state).state_after(5)
    for message, changed in {
        "seed is 1, but .* saved with seed 0": (sources, weights, 8, 1, state),
        "seq_length is 16, but .* seq_length 8": (sources, weights, 16, 0, state),
        "source 's1' contains other data": (other, weights, 8, 0, state),
        # This source was removed from the mixture for some time.
        "source 's1' contains .* when": (other, weights, 8, 0, later),
    }.items():
        with pytest.raises(UserError, match=message):
            Sampler(*changed)


def test_a_source_without_a_sample_is_refused():
    with pytest.raises(UserError, match="share of source 's0' is below"):
        Sampler(with_windows(5, 5), {"s0": 1e-9, "s1": 1}, 8, 0)
    with pytest.raises(UserError, match="source 'a' has 8 tokens, but .* seq_length 8 needs 9"):
        Sampler({"a": source(8)}, {"a": 1}, 8, 0)


def test_a_position_is_reported_in_tokens_and_epochs():
    """progress_by_source returns how many tokens and epochs of each source have been drawn. An epoch of a run contains
    the windows of all sources with a weight above 0."""
    order = Sampler(with_windows(40, 20, 10), {"s0": 1, "s1": 1, "s2": 0}, 8, 0)
    assert order.epoch_windows == 60
    counts = progress_by_source(order.state_after(60))
    assert counts["source_tokens"] == {"s0": 240, "s1": 240, "s2": 0}
    assert counts["source_epochs"] == {"s0": 0.75, "s1": 1.5, "s2": 0.0}


@pytest.mark.torch22
def test_the_order_never_changes_between_versions():
    """A run that resumes with a newer version of the program must find the same order. The expected windows are
    therefore part of the file format."""
    order = Sampler(with_windows(1000, 10, 10**9), {"s0": 3, "s1": 1, "s2": 4}, 8, 42)
    index, window = order.samples(0, 12)
    assert index.tolist() == [2, 0, 2, 0, 1, 2, 0, 2, 2, 0, 2, 0]
    of_large = [938386356, 829723274, 986379351, 962299582, 512951649, 867599011]
    assert window[index == 2].tolist() == of_large
    assert window[index != 2].tolist() == [918, 173, 9, 757, 496, 888]
    thirds = Sampler(with_windows(9, 9), {"s0": 1, "s1": 2}, 8, 42)
    assert thirds.state_after(0)["pattern"] == {"s0": 349525, "s1": 699051}
