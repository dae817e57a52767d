"""Batches: the windows that the sampler names, read ahead by threads and cut into this rank's micro
batches.

The content of a step depends on the sampler and the global batch only: ranks and micro batches are
slices of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from mamba_fsdp.conventions import IGNORED_LABEL
from mamba_fsdp.data.sampler import Sampler
from mamba_fsdp.data.source import Source, Tokens
from mamba_fsdp.errors import UserError
from mamba_fsdp.ops.attention import Documents
from mamba_fsdp.settings.train_config import DataConfig, TrainConfig

# Samples that the sampler is asked for at once: of a few, the calls cost more than to read them.
SAMPLES_AT_ONCE = 1 << 10

Sample = tuple[str, int | None]  # (source name, window); None pads a batch


class Batch(NamedTuple):
    """Whole sequences, or a SequencePart of each: then `length` stands for seq_length, but seq_idx has all parts."""

    tokens: torch.Tensor  # (batch, seq_length) int64
    labels: torch.Tensor  # (batch, seq_length) int64: the next token, or IGNORED_LABEL
    seq_idx: torch.Tensor | None = None  # (batch, seq_length) int32, 0 for a row's first document
    samples: Sequence[Sample] = ()  # of each row
    # (batch, seq_length) float32, of each label in the loss; None: 1
    weights: torch.Tensor | None = None
    documents: Documents | None = None  # that seq_idx tells apart

    def total_weight(self) -> float:
        """Returns the sum of the weights of the labels that count, by which a sum of losses becomes
        a mean."""
        counted = self.labels != IGNORED_LABEL
        if self.weights is None:
            return float(counted.sum())
        return float((self.weights.double() * counted).sum())

    def to(self, device: torch.device) -> "Batch":
        return self._with_each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        return self._with_each(torch.Tensor.pin_memory)

    def _with_each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        fields = self._asdict()
        for name, field in fields.items():
            if isinstance(field, torch.Tensor):
                fields[name] = change(field)
        return Batch(**fields)


@dataclass(frozen=True)
class SequencePart:
    """The positions of each sequence that a rank computes: of `count` parts of `length` positions, the one with number
    `index`. They may reach beyond the end, where no label counts."""

    index: int
    count: int
    length: int

    def of(self, batch: Batch) -> Batch:
        """Returns the batch with the tokens, labels and weights of this part, the seq_idx of all parts, and the documents
        up to this part's end."""
        seq_length = batch.tokens.shape[1]
        beyond = self.count * self.length - seq_length
        first = self.index * self.length

        def cut(tensor, fill):
            filled = F.pad(tensor, (0, beyond), value=fill)
            return filled[:, first : first + self.length].contiguous()

        weights = batch.weights
        if weights is not None:
            weights = cut(weights, 0)
        seq_idx = batch.seq_idx
        whole_rows = torch.zeros(len(batch.tokens), seq_length + beyond, dtype=torch.int32)
        if seq_idx is not None:
            last = seq_idx[:, -1:].expand(-1, beyond)
            seq_idx = torch.cat([seq_idx, last], dim=1)
            whole_rows = seq_idx
        seen = whole_rows[:, : first + self.length]
        return batch._replace(
            tokens=cut(batch.tokens, 0),
            labels=cut(batch.labels, IGNORED_LABEL),
            weights=weights,
            seq_idx=seq_idx,
            documents=Documents.asked_by_last(seen, self.length),
        )


@dataclass(frozen=True)
class BatchLayout:
    """How the samples of a step are cut: by rank, then by micro batch, then maybe by position. Ranks that share their
    sequences count as one here."""

    rank: int
    world_size: int
    batch_size: int  # samples of a micro batch
    grad_accumulation_steps: int = 1  # of each rank
    part: SequencePart | None = None  # None: whole sequences

    @property
    def global_batch(self) -> int:
        return self.world_size * self.grad_accumulation_steps * self.batch_size


def own_positions(settings: TrainConfig) -> int:
    """Returns how many positions of each sequence a rank computes."""
    sharing = settings.parallel.context_parallel
    if sharing == 1:
        return settings.data.seq_length
    needed = settings.model.d_conv - 1  # by the convolution of the rank behind
    return max(-(-settings.data.seq_length // sharing), needed)


def split_step(settings: TrainConfig, rank: int, ranks: int) -> BatchLayout:
    """Returns this rank's part of a step. Raises UserError where the ranks or the global batch can't
    be split evenly."""
    training = settings.training
    sharing = settings.parallel.context_parallel
    if ranks % sharing:
        raise UserError(
            f"context_parallel={sharing} does not divide the number of devices, {ranks}; start a multiple of it, or change it"
        )
    part = None
    who = "ranks"
    if sharing > 1:
        part = SequencePart(rank % sharing, sharing, own_positions(settings))
        who = f"groups of {sharing} ranks"
    rank = rank // sharing
    ranks = ranks // sharing
    per_pass = training.batch_size * ranks
    global_batch = training.global_batch_size or per_pass * training.gradient_accumulation_steps
    if global_batch % per_pass:
        raise UserError(
            f"global_batch_size {global_batch} is not a multiple of batch_size {training.batch_size} times "
            f"{ranks} {who}; change it, or let batch_size divide {global_batch / ranks:g}"
        )
    return BatchLayout(rank, ranks, training.batch_size, global_batch // per_pass, part)


@dataclass(eq=False)
class Loader(ExitStack):
    """This rank's micro batches of every step: step s takes samples [g*G, (g+1)*G), g = s - first_step, G the global
    batch of `layout`.

    data.num_workers threads read up to data.prefetch steps ahead (0 workers: `step` itself reads). A context manager;
    `close` stops the threads."""

    sources: Mapping[str, Source]
    sampler: Sampler  # of these sources
    data: DataConfig
    layout: BatchLayout
    vocab_size: int  # the model's
    first_step: int = 0
    pin_memory: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        same_length = self.sampler.seq_length == self.data.seq_length
        assert same_length, "the sampler counts windows of another length"
        self.block = lru_cache(4)(self._read_block)
        self.ahead: dict[int, Future[list[Batch]]] = {}  # step -> its micro batches
        self.pool = None
        if self.data.num_workers:
            self.pool = ThreadPoolExecutor(self.data.num_workers, "loader")
            self.callback(self.pool.shutdown, cancel_futures=True)

    def step(self, step: int) -> list[Batch]:
        """Returns the micro batches of any step; consecutive steps are read ahead. Raises UserError
        with source and window."""
        if not self.pool:
            return self._read(step)
        soon = set(range(step, step + self.data.prefetch + 1))
        for other in self.ahead.keys() - soon:
            self.ahead.pop(other).cancel()
        for wanted in sorted(soon - self.ahead.keys()):
            self.ahead[wanted] = self.pool.submit(self._read, wanted)
        return self.ahead.pop(step).result()

    def state_before(self, step: int) -> dict[str, Any]:
        """Returns the data's position before `step`: what a checkpoint saves, and
        Sampler(state=...) takes."""
        return self.sampler.state_after((step - self.first_step) * self.layout.global_batch)

    def _read(self, step: int) -> list[Batch]:
        size = self.layout.batch_size
        mine = self.layout.grad_accumulation_steps * size
        first = (step - self.first_step) * self.layout.global_batch + self.layout.rank * mine
        samples = self._samples(first, mine)
        batches = []
        for start in range(0, mine, size):
            micro_batch = samples[start : start + size]
            batch = _batch(
                self.sources, micro_batch, self.data, self.vocab_size, self.data.seq_length
            )
            if self.layout.part:
                batch = self.layout.part.of(batch)
            if self.pin_memory:
                batch = batch.pin_memory()
            batches.append(batch)
        return batches

    def _samples(self, first: int, count: int) -> list[Sample]:
        """Returns samples [first, first + count)."""
        first_block = first // SAMPLES_AT_ONCE
        last_block = (first + count - 1) // SAMPLES_AT_ONCE
        found: list[Sample] = []
        for block in range(first_block, last_block + 1):
            found += self.block(block)
        start = first - first_block * SAMPLES_AT_ONCE
        return found[start : start + count]

    def _read_block(self, block: int) -> list[Sample]:
        sources, windows, _ = self.sampler.samples(block * SAMPLES_AT_ONCE, SAMPLES_AT_ONCE)
        names = [self.sampler.names[source] for source in sources.tolist()]
        return list(zip(names, windows.tolist()))


def evaluation_windows(token_count: int, seq_length: int, stride: int, limit: int) -> np.ndarray:
    """Returns the windows that predict each token of a source but its first once, window w from
    token w * stride on; or `limit` of them, spread evenly; 0: all. Behind the first, those of a smaller
    stride predict their last `stride` tokens only, each from seq_length - stride tokens or more
    before it."""
    behind_the_first = max(0, token_count - 1 - seq_length)
    windows = 1 + -(-behind_the_first // stride)
    chosen = min(limit or windows, windows)
    return np.arange(chosen) * windows // chosen


def evaluation_batches(
    source: Source,
    name: str,
    data: DataConfig,
    layout: BatchLayout,
    *,
    vocab_size: int,
    limit: int = 0,
    stride: int = 0,
) -> Iterator[Batch]:
    """Yields this rank's batches over a source in its own order: `limit` windows spread evenly over
    it; 0: all of it.

    The windows are the same for every world size, and each token but the first is a label exactly
    once; stride: see evaluation_windows; 0: seq_length. All ranks get the same number of full
    batches, as sharded models need: what pads the last ones has no label that counts."""
    if source.token_count < 2:
        raise UserError(f"source {name!r} has {source.token_count} tokens: nothing to evaluate")
    stride = stride or data.seq_length
    windows = evaluation_windows(source.token_count, data.seq_length, stride, limit).tolist()
    size = layout.batch_size
    for first in range(0, len(windows), layout.world_size * size):
        start = first + layout.rank * size
        samples: list[Sample] = [(name, window) for window in windows[start : start + size]]
        samples += [(name, None)] * (size - len(samples))
        batch = _batch({name: source}, samples, data, vocab_size, stride)
        yield layout.part.of(batch) if layout.part else batch


def _batch(
    sources: Mapping[str, Source],
    samples: Sequence[Sample],
    data: DataConfig,
    vocab_size: int,
    stride: int,
) -> Batch:
    """Returns the batch of these samples, window w from token w * stride on."""
    shape = (len(samples), data.seq_length)
    tokens = np.zeros(shape, np.int64)
    labels = np.full(shape, IGNORED_LABEL, np.int64)
    seq_idx = np.zeros(shape, np.int32)
    weights = np.zeros(shape, np.float32)
    for row, (name, window) in enumerate(samples):
        if window is None:
            continue
        start = window * stride
        length = min(data.seq_length, sources[name].token_count - 1 - start)
        place = f"source {name!r}, window {window} (tokens {start} to {start + length})"
        found = _read_window(sources[name], start, length, vocab_size, place)
        tokens[row, :length] = found.tokens[:-1]
        labels[row, :length] = found.tokens[1:]
        if window:
            labels[row, : data.seq_length - stride] = (
                IGNORED_LABEL  # the windows before predict them
            )
        if data.reset_at_documents:
            seq_idx[row, :length] = np.cumsum(_starts(found.positions)[:-1])
        if data.position_weighting:
            place_in_window = np.arange(length + 1)
            starts = np.where(_starts(found.positions), place_in_window, 0)
            before = place_in_window - np.maximum.accumulate(starts)
            weights[row, :length] = np.tanh(before[1:] / data.position_window)
            labels[row, weights[row] == 0] = IGNORED_LABEL
    batch = Batch(torch.from_numpy(tokens), torch.from_numpy(labels), samples=samples)
    if data.reset_at_documents:
        documents = torch.from_numpy(seq_idx)
        batch = batch._replace(seq_idx=documents, documents=Documents.of(documents))
    if data.position_weighting:
        batch = batch._replace(weights=torch.from_numpy(weights))
    return batch


def _starts(positions: np.ndarray) -> np.ndarray:
    """Returns where a document starts in a window (n,) bool; the first never does. The file may
    lack its head."""
    return np.append(False, positions[1:] <= positions[:-1])


def _read_window(source: Source, start: int, length: int, vocab_size: int, place: str) -> Tokens:
    """Returns the tokens of a window and the one after it. Raises UserError, with its place."""
    try:
        found = source.read(start, length + 1)
        if found.tokens.max() >= vocab_size:
            raise UserError(
                f"token id {found.tokens.max()} is not below the model's vocab_size {vocab_size}; "
                "set vocab_size to the tokenizer's, or tokenise with the model's tokenizer"
            )
    except Exception as error:
        kind = type(error) if isinstance(error, UserError) else UserError
        raise kind(f"{place}: {error}") from error
    return found
