"""Batches: the windows that the order names, read ahead by threads and cut into this rank's micro batches.

The content of a step depends on the order and the global batch only: ranks and micro batches are slices of it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from config.train_config import DataConfig, TrainingConfig
from mamba_fsdp.conventions import IGNORED_LABEL
from mamba_fsdp.data.sampler import Sampler
from mamba_fsdp.data.source import Source
from mamba_fsdp.errors import UserError

TOGETHER = (
    1 << 10
)  # samples that the order is asked for at once: of a few, the calls cost more than the work


class Batch(NamedTuple):
    tokens: torch.Tensor  # (batch, seq_length) int64
    labels: torch.Tensor  # (batch, seq_length) int64: the next token, or IGNORED_LABEL
    documents: torch.Tensor | None = None  # (batch, seq_length) int32, 0 for a row's first document
    samples: Sequence[tuple[str, int | None]] = ()  # (source name, window) of each row
    weights: torch.Tensor | None = (
        None  # (batch, seq_length) float32, of each label in the loss; None: 1
    )

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """With every tensor changed."""
        documents, weights = (
            None if tensor is None else change(tensor) for tensor in (self.documents, self.weights)
        )
        return Batch(change(self.tokens), change(self.labels), documents, self.samples, weights)

    def total_weight(self) -> float:
        """The sum of the weights of the labels that count, by which a sum of losses becomes a mean."""
        counted = self.labels != IGNORED_LABEL
        return float((counted if self.weights is None else self.weights.double() * counted).sum())

    def to(self, device: torch.device) -> "Batch":
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class BatchLayout:
    """How the samples of a step are cut: by rank, then by micro batch."""

    rank: int
    world_size: int
    batch_size: int  # samples of a micro batch
    grad_accumulation_steps: int = 1  # of each rank

    @property
    def global_batch(self) -> int:
        return self.world_size * self.grad_accumulation_steps * self.batch_size


def split_step(training: TrainingConfig, rank: int, ranks: int) -> BatchLayout:
    """Returns this rank's part of a step. Raises UserError where the global batch can't be split evenly."""
    per_pass = training.batch_size * ranks
    global_batch = training.global_batch_size or per_pass * training.gradient_accumulation_steps
    if global_batch % per_pass:
        raise UserError(
            f"global_batch_size {global_batch} is no multiple of batch_size {training.batch_size} times "
            f"{ranks} ranks; change it, or let batch_size divide {global_batch / ranks:g}"
        )
    return BatchLayout(rank, ranks, training.batch_size, global_batch // per_pass)


class Loader(ExitStack):
    """This rank's micro batches of every step.

    order: the Sampler of these sources. Step s takes samples [g*G, (g+1)*G) of the order, g = s - first_step, G the
    global batch of `split`. data.num_workers threads read up to data.prefetch steps ahead (0 workers: `step` itself
    reads). vocab_size: the model's. A context manager; `close` stops the threads.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        order: Sampler,
        data: DataConfig,
        split: BatchLayout,
        *,
        vocab_size: int,
        first_step: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        assert order.seq_length == data.seq_length, "the order counts windows of another length"
        self.sources, self.order, self.data, self.split = sources, order, data, split
        self.vocab_size, self.first_step, self.pin_memory = vocab_size, first_step, pin_memory
        self.pool = ThreadPoolExecutor(data.num_workers, "loader") if data.num_workers else None
        if self.pool:
            self.callback(self.pool.shutdown, cancel_futures=True)
        self.together = lru_cache(4)(
            lambda block: np.stack(order.samples(block * TOGETHER, TOGETHER)[:2])
        )
        self.ahead: dict[int, Future[list[Batch]]] = {}  # step -> its micro batches

    def step(self, step: int) -> list[Batch]:
        """The micro batches of any step; consecutive steps are read ahead. Raises UserError with source and window."""
        if not self.pool:
            return self._read(step)
        soon = range(step, step + self.data.prefetch + 1)
        for other in set(self.ahead) - set(soon):
            self.ahead.pop(other).cancel()
        for wanted in sorted(set(soon) - set(self.ahead)):
            self.ahead[wanted] = self.pool.submit(self._read, wanted)
        return self.ahead.pop(step).result()

    def state_before(self, step: int) -> dict[str, Any]:
        """The data's position before `step`: what a checkpoint saves, and Sampler(state=...) takes."""
        return self.order.state_after((step - self.first_step) * self.split.global_batch)

    def _read(self, step: int) -> list[Batch]:
        size = self.split.batch_size
        mine = self.split.grad_accumulation_steps * size
        first = (step - self.first_step) * self.split.global_batch + self.split.rank * mine
        source, window = self._windows(first, mine)
        samples = [(self.order.names[s], w) for s, w in zip(source.tolist(), window.tolist())]
        return [
            _batch(
                self.sources, samples[at : at + size], self.data, self.vocab_size, self.pin_memory
            )
            for at in range(0, mine, size)
        ]

    def _windows(self, first: int, count: int) -> np.ndarray:
        """(2, count): source and window of samples from `first` on, in small steps computed TOGETHER with others."""
        if self.split.global_batch > TOGETHER // 4:
            return np.stack(self.order.samples(first, count)[:2])
        blocks = range(first // TOGETHER, (first + count - 1) // TOGETHER + 1)
        at = first - blocks[0] * TOGETHER
        return np.concatenate([self.together(block) for block in blocks], axis=1)[
            :, at : at + count
        ]


def evaluation_windows(
    token_count: int, seq_length: int, stride: int, limit: int | None
) -> np.ndarray:
    """The windows that predict each token of a source but its first once, window w from token w * stride on; or `limit`
    of them, spread evenly. Behind the first, those of a smaller stride predict their last `stride` tokens only, each
    from seq_length - stride tokens or more before it."""
    windows = 1 + max(0, -(-(token_count - 1 - seq_length) // stride))
    chosen = min(limit or windows, windows)
    return np.arange(chosen) * windows // chosen


def evaluation_batches(
    source: Source,
    name: str,
    data: DataConfig,
    split: BatchLayout,
    *,
    vocab_size: int,
    limit: int | None = None,
    stride: int = 0,
) -> Iterator[Batch]:
    """Yield this rank's batches over a source in its own order: all of it, or `limit` windows spread evenly over it.

    The windows are the same for every world size, and each token but the first is a label exactly once; stride: see
    evaluation_windows; 0: seq_length. All ranks get the same number of full batches, as sharded models need: what pads
    the last ones has no label that counts.
    """
    if source.token_count < 2:
        raise UserError(f"source {name!r} has {source.token_count} tokens: nothing to evaluate")
    windows = evaluation_windows(
        source.token_count, data.seq_length, stride or data.seq_length, limit
    ).tolist()
    for first in range(0, len(windows), split.world_size * split.batch_size):
        at = first + split.rank * split.batch_size
        mine = windows[at : at + split.batch_size]
        samples = [(name, window) for window in mine] + [(name, None)] * (
            split.batch_size - len(mine)
        )
        yield _batch({name: source}, samples, data, vocab_size, stride=stride)


def _batch(
    sources: Mapping[str, Source],
    samples: Sequence[tuple[str, int | None]],
    data: DataConfig,
    vocab_size: int,
    pin_memory: bool = False,
    stride: int = 0,
) -> Batch:
    shape = (len(samples), data.seq_length)
    tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
    documents = np.zeros(shape, np.int32) if data.reset_at_documents else None
    weights = np.zeros(shape, np.float32) if data.position_weighting else None
    for row, (name, window) in enumerate(samples):
        if window is None:
            continue
        source, start = sources[name], window * (stride or data.seq_length)
        length = min(data.seq_length, source.token_count - 1 - start)
        try:
            window_tokens, positions, mask = source.read(start, length + 1)
            if window_tokens.max() >= vocab_size:
                raise UserError(
                    f"token id {window_tokens.max()} is not below the model's vocab_size {vocab_size}; "
                    "set vocab_size to the tokenizer's, or tokenise with the model's tokenizer"
                )
        except Exception as error:
            place = f"source {name!r}, window {window} (tokens {start} to {start + length})"
            raise (type(error) if isinstance(error, UserError) else UserError)(
                f"{place}: {error}"
            ) from error
        tokens[row, :length] = window_tokens[:-1]
        labels[row, :length] = window_tokens[1:]
        if stride and window:
            labels[row, : data.seq_length - stride] = (
                IGNORED_LABEL  # the windows before have predicted them
            )
        if mask is not None:
            labels[row, :length][~mask[1:]] = IGNORED_LABEL
        if documents is not None:
            documents[row, :length] = np.cumsum(_starts(positions)[:-1])
        if weights is not None:
            at = np.arange(length + 1)
            before = at - np.maximum.accumulate(np.where(_starts(positions), at, 0))
            weights[row, :length] = np.tanh(before[1:] / data.position_window)
            labels[row, weights[row] == 0] = IGNORED_LABEL
    documents, weights = (
        None if array is None else torch.from_numpy(array) for array in (documents, weights)
    )
    batch = Batch(torch.from_numpy(tokens), torch.from_numpy(labels), documents, samples, weights)
    return batch.each(torch.Tensor.pin_memory) if pin_memory else batch


def _starts(positions):
    """Where a document starts in a window (n,) bool; the first never does. The file may lack the document's head."""
    return np.append(False, positions[1:] <= positions[:-1])
