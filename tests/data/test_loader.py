"""Batches hold what the order says, whoever reads them: any world size, split, number of threads; and errors reach the
caller."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_fsdp.conventions import IGNORED_LABEL
from mamba_fsdp.data.loader import BatchShape, Loader, evaluation_batches
from mamba_fsdp.data.sampler import Sampler
from mamba_fsdp.data.source import Tokens
from mamba_fsdp.errors import UserError
from mamba_fsdp.settings.train_config import DataConfig
from tests.support.processes import wait_until

L = 8


class Numbers:
    """A source whose token i is first + i, in documents of `document` tokens."""

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


def loader_of(
    sources, *batch_shape, state=None, seed=0, vocab_size=10**6, first_step=0, num_workers=2, **data
):
    """batch_shape: as BatchShape has it."""
    order = Sampler(sources, {name: i + 1.5 for i, name in enumerate(sources)}, L, seed, state)
    return Loader(
        sources,
        order,
        DataConfig(seq_length=L, num_workers=num_workers, **data),
        BatchShape(*batch_shape),
        vocab_size=vocab_size,
        first_step=first_step,
    )


def rows_of_step(sources, step, split, **settings):
    """The samples and tokens of a step over all ranks, in order. split: (ranks, batch size, batches of each)."""
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


@settings(deadline=None, max_examples=25)
@given(
    split=st.sampled_from([(1, 12, 1), (1, 1, 12), (2, 3, 2), (3, 2, 2), (4, 3, 1), (12, 1, 1)]),
    workers=st.integers(0, 3),
    prefetch=st.integers(0, 4),
    step=st.integers(0, 40),
    seed=st.integers(0, 9),
)
def test_a_step_is_the_same_for_every_world_size_split_and_worker_count(
    split, workers, prefetch, step, seed
):
    sources = two_sources()
    samples, tokens, labels = rows_of_step(
        sources, step, split, num_workers=workers, prefetch=prefetch, seed=seed
    )
    expected = rows_of_step(sources, step, (1, 12), num_workers=0, seed=seed)
    assert samples == expected[0]
    assert torch.equal(tokens, expected[1]) and torch.equal(labels, expected[2])


@pytest.mark.parametrize("workers, prefetch, steps", [(0, 1, 1), (1, 2, 3), (3, 2, 3), (1, 5, 6)])
def test_threads_read_as_many_steps_ahead_as_they_are_told(workers, prefetch, steps):
    """Without threads only the step that is asked for is read; with several they read at once."""
    at_once = threading.Barrier(max(1, workers))
    threads = []

    class Watched(Numbers):
        def read(self, start, length):
            at_once.wait(20)
            threads.append(threading.current_thread())
            return super().read(start, length)

    source = {"a": Watched(50 * L + 1)}
    with loader_of(source, 0, 1, 1, num_workers=workers, prefetch=prefetch) as loader:
        loader.step(0)
        wait_until(lambda: len(threads) >= steps, "the steps ahead")
    assert len(threads) == steps and len(set(threads)) == max(1, workers)
    assert (threading.current_thread() in threads) == (workers == 0)


def test_rows_are_the_windows_and_labels_are_shifted_by_one():
    sources = two_sources()
    with loader_of(sources, 0, 1, 6, 2) as loader:
        for step in range(5):
            for batch in loader.step(step):
                assert (
                    batch.tokens.dtype == batch.labels.dtype == torch.int64
                    and batch.seq_idx is None
                )
                for row, (name, window) in enumerate(batch.samples):
                    tokens = sources[name].first + window * L + torch.arange(L + 1)
                    assert torch.equal(batch.tokens[row], tokens[:-1]) and torch.equal(
                        batch.labels[row], tokens[1:]
                    )


def test_resuming_at_any_step_with_another_split_is_as_if_unbroken():
    """A state taken before step s, continued with other ranks, threads, batch and numbering, gives the same samples
    on."""
    sources = two_sources()
    with loader_of(sources, 0, 1, 12) as whole:
        unbroken = [sample for step in range(40) for sample in whole.step(step)[0].samples]
        for step in (0, 1, 7, 20):
            state = whole.state_before(step)  # no matter how far the threads have read ahead
            samples = []
            for later in range(step, step + 4):
                rows = rows_of_step(sources, later, (2, 3, 3), state=state, first_step=step)
                samples += rows[0]
            assert samples == unbroken[12 * step :][:72]


def test_documents_are_counted_from_each_rows_first_token():
    sources = {"a": Numbers(50 * L + 1, document=3)}
    with loader_of(sources, 0, 1, 25, reset_at_documents=True) as loader:
        batch = loader.step(0)[0]
    assert batch.seq_idx.dtype == torch.int32
    for row, (_, window) in enumerate(batch.samples):
        document = (window * L + torch.arange(L)) // 3
        assert torch.equal(batch.seq_idx[row].long(), document - document[0])


def test_labels_weigh_by_what_of_their_document_stands_before_them_in_the_row():
    """tanh(p / window), p counted from the start of the row or of the document in it; a start itself is ignored."""
    sources = {"a": Numbers(50 * L + 1, document=5)}
    with loader_of(sources, 0, 1, 25, position_weighting=True, position_window=3) as loader:
        batch = loader.step(0)[0]
    total = 0.0
    for row, (_, window) in enumerate(batch.samples):
        for place, label in enumerate(range(window * L + 1, window * L + L + 1)):
            weight = np.tanh(min(label % 5, place + 1) / 3)
            if label % 5 == 0:
                assert batch.labels[row, place] == IGNORED_LABEL
            else:
                assert batch.labels[row, place] == label
                assert batch.weights[row, place] == pytest.approx(weight, rel=1e-6)
                total += weight
    assert batch.weights.dtype == torch.float32 and batch.total_weight() == pytest.approx(
        total, rel=1e-6
    )


def test_a_document_without_its_head_is_one_of_its_own():
    """Positions that fall, though not to 0, begin a document: nothing of the one before weighs or reaches in."""
    source = Numbers(L + 1)
    read = source.read
    source.read = lambda start, count: read(start, count)._replace(
        positions=np.array([7, 8, 9, 5, 6, 7, 0, 0, 1])
    )
    with loader_of(
        {"a": source}, 0, 1, 1, position_weighting=True, reset_at_documents=True
    ) as loader:
        batch = loader.step(0)[0]
    assert batch.seq_idx.tolist() == [[0, 0, 0, 1, 1, 1, 2, 3]]
    assert torch.allclose(batch.weights, torch.tensor([[1, 2, 0, 1, 2, 0, 0, 1]]).div(10).tanh())


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_while_reading_reaches_the_caller_with_the_sources_name(workers):
    with loader_of({"wiki": Broken(100)}, 0, 1, 2, num_workers=workers) as loader:
        with pytest.raises(
            UserError, match=r"source 'wiki', window \d+ \(tokens .*Input/output error.*0001.bin"
        ):
            loader.step(0)
        with pytest.raises(UserError, match="wiki"):  # and again, without hanging
            loader.step(1)


def test_a_token_outside_the_models_vocabulary_is_refused():
    """On a GPU it would be a device-side assertion that names nothing."""
    with loader_of({"a": Numbers(50 * L + 1)}, 0, 1, 50, vocab_size=50 * L) as loader:
        with pytest.raises(
            UserError,
            match="source 'a', window 49 .*token id 400 is not below the model's vocab_size 400",
        ):
            loader.step(0)
    with loader_of({"a": Numbers(50 * L + 1)}, 0, 1, 50, vocab_size=50 * L + 1) as loader:
        loader.step(0)


def evaluated(source, world_size, batch_size, limit=None):
    ranks = [
        list(
            evaluation_batches(
                source,
                "valid",
                DataConfig(seq_length=L),
                BatchShape(rank, world_size, batch_size),
                vocab_size=10**6,
                limit=limit,
            )
        )
        for rank in range(world_size)
    ]
    assert (
        len({len(batches) for batches in ranks}) == 1
    )  # sharded models need every rank in every forward
    return [batch for batches in ranks for batch in batches]


@settings(deadline=None, max_examples=40)
@given(token_count=st.integers(2, 200), world_size=st.integers(1, 4), batch_size=st.integers(1, 5))
def test_evaluation_predicts_every_token_once_on_any_world_size(
    token_count, world_size, batch_size
):
    batches = evaluated(Numbers(token_count), world_size, batch_size)
    labels = torch.cat([batch.labels[batch.labels != IGNORED_LABEL] for batch in batches])
    assert sorted(labels.tolist()) == list(range(1, token_count))
    for batch in batches:
        assert batch.tokens.shape == batch.labels.shape == (batch_size, L)
        counted = batch.labels != IGNORED_LABEL
        assert torch.equal(batch.labels[counted], batch.tokens[counted] + 1)


def test_a_validation_source_without_two_tokens_is_refused():
    with pytest.raises(UserError, match="'valid' has 1 token:"):
        evaluated(Numbers(1), 1, 1)
