"""Tests mamba_fsdp.data.loader: batches contain the samples of the sampler for any number of ranks, micro-batches and
threads, and errors are raised in the caller."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_fsdp.conventions import IGNORED_LABEL
from mamba_fsdp.data.loader import (
    BatchShape,
    Loader,
    SequenceSlice,
    evaluation_batches,
    split_step,
)
from mamba_fsdp.data.sampler import Sampler
from mamba_fsdp.data.source import Tokens
from mamba_fsdp.errors import UserError
from mamba_fsdp.run.names import WANTED_NODES_VARIABLE
from mamba_fsdp.settings.train_config import DataConfig
from tests.support.processes import wait_until
from tests.support.tiny import resolved

L = 8


class Numbers:
    """Simulates a source in which token i is first + i, and each document has `document` tokens."""

    def __init__(self, token_count, first=0, document=5):
        self.token_count = token_count
        self.first = first
        self.document = document
        self.identity = f"{token_count} from {first}"

    def read(self, start, count):
        place = np.arange(start, start + count)
        tokens = (self.first + place).astype(np.uint32)
        return Tokens(tokens, (place % self.document).astype(np.int32))


class Broken(Numbers):
    def read(self, start, count):
        raise OSError(5, "Input/output error", "/lustre/0001.bin")


def two_sources():
    return {"a": Numbers(50 * L + 3), "b": Numbers(20 * L + 1, first=10_000)}


def order_of(sources, seed=0):
    weights = {name: number + 1.5 for number, name in enumerate(sources)}
    return Sampler(sources, weights, L, seed)


def loader_of(sources, *batch_shape, seed=0, vocab_size=10**6, num_workers=2, **data):
    """Returns a Loader of the sources. batch_shape: the arguments of BatchShape."""
    return Loader(
        sources,
        order_of(sources, seed),
        DataConfig(seq_length=L, num_workers=num_workers, **data),
        BatchShape(*batch_shape),
        vocab_size=vocab_size,
    )


def rows_of_step(sources, step, split, **settings):
    """Returns the samples, tokens and labels of a step, concatenated over all ranks. split: (number of ranks, batch
    size, number of micro-batches)."""
    world_size, *each = split
    samples, tokens, labels = [], [], []
    for rank in range(world_size):
        with loader_of(sources, rank, world_size, *each, **settings) as loader:
            batches = loader.step(step)
        for batch in batches:
            samples += batch.samples
            tokens.append(batch.tokens)
            labels.append(batch.labels)
    return samples, torch.cat(tokens), torch.cat(labels)


SPLITS = [(1, 12, 1), (1, 1, 12), (2, 3, 2), (3, 2, 2), (4, 3, 1), (12, 1, 1)]


@settings(max_examples=25)
@given(
    split=st.sampled_from(SPLITS),
    workers=st.integers(0, 3),
    prefetch=st.integers(0, 4),
    step=st.integers(0, 40),
    seed=st.integers(0, 9),
)
def test_a_step_is_its_samples_for_every_world_size_split_and_worker_count(
    split, workers, prefetch, step, seed
):
    """A step consists of the sampler's next samples, however it is divided among ranks and micro-batches, and with
    any number of threads. A row contains the window of its sample, and its labels are the same tokens, shifted by
    one."""
    sources = two_sources()
    samples, tokens, labels = rows_of_step(
        sources, step, split, num_workers=workers, prefetch=prefetch, seed=seed
    )
    index, windows = order_of(sources, seed).samples(12 * step, 12)
    names = ["ab"[number] for number in index]
    assert samples == list(zip(names, windows.tolist()))
    firsts = np.array([sources[name].first for name in names]) + windows * L
    expected = torch.from_numpy(firsts[:, None] + np.arange(L))
    assert torch.equal(tokens, expected) and torch.equal(labels, expected + 1)
    assert tokens.dtype == labels.dtype == torch.int64


@pytest.mark.parametrize("workers, prefetch, steps", [(0, 1, 1), (1, 2, 3), (3, 5, 6)])
def test_threads_read_the_configured_number_of_steps_ahead(workers, prefetch, steps):
    """The threads of a loader read `prefetch` steps ahead. Without threads, only the requested step is read."""
    reads = []

    class Watched(Numbers):
        def read(self, start, length):
            reads.append(start)
            return super().read(start, length)

    source = {"a": Watched(50 * L + 1)}
    with loader_of(source, 0, 1, 1, num_workers=workers, prefetch=prefetch) as loader:
        loader.step(0)
        wait_until(lambda: len(reads) >= steps, "the steps ahead")
    assert len(reads) == steps


def test_documents_of_a_row_are_numbered_and_labels_weighted_by_position():
    """seq_idx counts the documents of each row from 0, and the label at the start of a document is ignored.

    The weight of a label is tanh(p / window), where p is the distance to the start of the row or of the document,
    whichever is nearer.
    """
    both = {"reset_at_documents": True, "position_weighting": True, "position_window": 3}
    with loader_of({"a": Numbers(50 * L + 1, document=5)}, 0, 1, 25, **both) as loader:
        (batch,) = loader.step(0)
    total = 0.0
    for row, (_, window) in enumerate(batch.samples):
        place = window * L + torch.arange(L)
        document = place // 5
        assert torch.equal(batch.seq_idx[row].long(), document - document[0])
        label = place + 1
        weight = torch.tanh(torch.minimum(label % 5, torch.arange(1, L + 1)) / 3)
        is_start = label % 5 == 0
        assert torch.equal(batch.labels[row], label.masked_fill(is_start, IGNORED_LABEL))
        assert torch.allclose(batch.weights[row], weight)
        total += float(weight.sum())
    assert batch.seq_idx.dtype == torch.int32 and batch.weights.dtype == torch.float32
    assert batch.total_weight() == pytest.approx(total, rel=1e-6)
    assert batch._replace(weights=None).total_weight() == float((batch.weights > 0).sum())


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_while_reading_reaches_the_caller_with_the_sources_name(workers):
    with loader_of({"wiki": Broken(100)}, 0, 1, 2, num_workers=workers) as loader:
        with pytest.raises(
            UserError, match=r"source 'wiki', window \d+ \(tokens .*Input/output error.*0001.bin"
        ):
            loader.step(0)


def test_a_token_outside_the_models_vocabulary_is_refused():
    """A token id that is not below the model's vocab_size is an error with its source and window. On a GPU it would
    cause a device-side assertion without a useful message."""
    with loader_of({"a": Numbers(50 * L + 1)}, 0, 1, 50, vocab_size=50 * L) as loader:
        refused = "source 'a', window 49 .*token id 400 is not below the model's vocab_size 400"
        with pytest.raises(UserError, match=refused):
            loader.step(0)


def evaluated(source, world_size, batch_size, stride):
    """Returns the evaluation batches of all ranks, in the order of the ranks.

    Asserts that all ranks have the same number of batches, because a sharded model needs every rank in every forward
    pass.
    """
    data = DataConfig(seq_length=L)
    how = {"vocab_size": 10**6, "limit": 0, "stride": stride}
    ranks = []
    for rank in range(world_size):
        shape = BatchShape(rank, world_size, batch_size)
        found = evaluation_batches(source, "valid", data, shape, **how)
        ranks.append(list(found))
    assert len({len(batches) for batches in ranks}) == 1
    return [batch for batches in ranks for batch in batches]


@settings(max_examples=40)
@given(
    token_count=st.integers(2, 200),
    world_size=st.integers(1, 4),
    batch_size=st.integers(1, 5),
    stride=st.integers(1, L),
)
def test_evaluation_predicts_every_token_once_on_any_world_size(
    token_count, world_size, batch_size, stride
):
    batches = evaluated(Numbers(token_count), world_size, batch_size, stride)
    labels = torch.cat([batch.labels[batch.labels != IGNORED_LABEL] for batch in batches])
    assert sorted(labels.tolist()) == list(range(1, token_count))
    for batch in batches:
        assert batch.tokens.shape == batch.labels.shape == (batch_size, L)
        counted = batch.labels != IGNORED_LABEL
        assert torch.equal(batch.labels[counted], batch.tokens[counted] + 1)


def test_a_validation_source_without_two_tokens_is_refused():
    with pytest.raises(UserError, match="'valid' has 1 token, too few"):
        evaluated(Numbers(1), 1, 1, L)


SMALL = {"batch_size": 2, "seq_length": 10, "d_conv": 4}
STEPS = [  # (number of ranks, settings, the expected BatchShape of rank 1)
    (2, {}, BatchShape(1, 2, 2)),
    (2, {"gradient_accumulation_steps": 3}, BatchShape(1, 2, 2, 3)),
    (2, {"global_batch_size": 8}, BatchShape(1, 2, 2, 2)),
    (2, {"context_parallel": 2}, BatchShape(0, 1, 2, 1, SequenceSlice(1, 2, 5))),
    (4, {"context_parallel": 4}, BatchShape(0, 1, 2, 1, SequenceSlice(1, 4, 3))),
]


@pytest.mark.parametrize(("ranks", "given", "expected"), STEPS)
def test_a_step_is_split_by_rank_then_micro_batch_then_position(ranks, given, expected):
    assert split_step(resolved(**SMALL, **given), 1, ranks) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, BatchShape(1, 4, 1, 3)),  # 3 nodes had 6 ranks, each with a micro-batch of 2 samples
        ({"global_batch_size": 24}, BatchShape(1, 4, 2, 3)),
    ],
)
def test_the_remaining_ranks_share_the_same_global_batch(monkeypatch, given, expected):
    monkeypatch.setenv(WANTED_NODES_VARIABLE, "3")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert split_step(resolved(**SMALL, **given), 1, 4) == expected


@pytest.mark.parametrize("count", [1, 2, 3])
def test_concatenated_slices_of_sequences_are_the_sequences(count):
    """The slices of a batch for context parallelism, concatenated, are the batch. Labels after the end of a sequence
    are ignored."""
    both = {"reset_at_documents": True, "position_weighting": True}
    with loader_of({"a": Numbers(50 * L + 1)}, 0, 1, 2, **both) as loader:
        (whole,) = loader.step(0)
    length = -(-L // count)
    slices = [SequenceSlice(index, count, length).of(whole) for index in range(count)]
    for field in ("tokens", "labels", "weights"):
        end_to_end = torch.cat([getattr(each, field) for each in slices], dim=1)
        assert end_to_end.shape[1] == count * length
        assert torch.equal(end_to_end[:, :L], getattr(whole, field))
        if field == "labels":
            assert (end_to_end[:, L:] == IGNORED_LABEL).all()
    for each in slices:
        assert torch.equal(each.seq_idx[:, :L], whole.seq_idx)
        assert sum(each.documents.asking) == 2 * length
