"""Reads this rank's micro-batches. The sampler chooses the windows, and threads read them ahead of time.

The content of a step depends only on the sampler and the global batch size. It is divided into slices for the ranks and
their micro-batches."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from mamba_fsdp.conventions import IGNORED_LABEL
from mamba_fsdp.data.sampler import Sampler
from mamba_fsdp.data.source import Source, Tokens
from mamba_fsdp.errors import UserError
from mamba_fsdp.model.config import round_up
from mamba_fsdp.ops.attention import Documents
from mamba_fsdp.run.names import WANTED_NODES_VARIABLE
from mamba_fsdp.settings.train_config import DataConfig, TrainConfig
from mamba_fsdp.text import format_count

Sample = tuple[str, int | None]  # (source name, window); a sample with the window None pads a batch


class Batch(NamedTuple):
    """The tokens and labels of one micro-batch.

    It contains whole sequences, or a SequenceSlice of each. In a batch of slices, the second dimension of tokens, labels and
    weights is the slice's `length` instead of seq_length; seq_idx covers all slices.
    """

    tokens: torch.Tensor  # (batch, seq_length) int64
    labels: torch.Tensor  # (batch, seq_length) int64: the next token, or IGNORED_LABEL
    # (batch, seq_length) int32, the index of each token's document in its row
    seq_idx: torch.Tensor | None = None
    samples: Sequence[Sample] = ()  # the sample in each row
    # (batch, seq_length) float32, the weight of each label; None: all weights are 1
    weights: torch.Tensor | None = None
    documents: Documents | None = None  # the documents in seq_idx

    def total_weight(self) -> float:
        """Returns the sum of the weights of all labels other than IGNORED_LABEL. The sum of the weighted losses divided by
        this sum is the mean loss."""
        is_counted = self.labels != IGNORED_LABEL
        if self.weights is None:
            return float(is_counted.sum())
        return float((self.weights.double() * is_counted).sum())

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
class SequenceSlice:
    """The positions of each sequence that a rank computes: slice number `index` of `count` slices with `length` positions.

    The last slices can reach beyond the end of the sequence. The labels there are IGNORED_LABEL.
    """

    index: int
    count: int
    length: int

    def of(self, batch: Batch) -> Batch:
        """Returns a batch with the tokens, labels and weights of this slice, the seq_idx of all slices, and the documents up
        to the end of this slice.

        batch: whole sequences."""
        seq_length = batch.tokens.shape[1]
        beyond = self.count * self.length - seq_length
        first = self.index * self.length

        def cut(tensor: torch.Tensor, fill: int) -> torch.Tensor:
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
        until_its_end = whole_rows[:, : first + self.length]
        return batch._replace(
            tokens=cut(batch.tokens, 0),
            labels=cut(batch.labels, IGNORED_LABEL),
            weights=weights,
            seq_idx=seq_idx,
            documents=Documents.asked_by_last(until_its_end, self.length),
        )


@dataclass(frozen=True)
class BatchShape:
    """How the samples of a step are split: by rank, then by micro-batch, then by position if ranks share sequences.

    A group of ranks that share their sequences counts as one rank here.
    """

    rank: int
    world_size: int
    batch_size: int  # the number of samples in a micro-batch
    grad_accumulation_steps: int = 1  # the number of micro-batches of each rank in a step
    sequence_slice: SequenceSlice | None = None  # None: whole sequences

    @property
    def global_batch(self) -> int:
        return self.world_size * self.grad_accumulation_steps * self.batch_size


def split_step(settings: TrainConfig, rank: int, ranks: int) -> BatchShape:
    """Splits a step between the ranks.

    rank: this rank. ranks: the number of ranks. Returns the BatchShape of this rank. Raises UserError if the ranks or the
    global batch can't be split evenly."""
    training = settings.training
    sharing = settings.parallel.context_parallel
    if ranks % sharing:
        raise UserError(
            f"context_parallel={sharing} does not divide the number of devices, {ranks}; change one of them"
        )
    sequence_slice = None
    who = "ranks"
    if sharing > 1:
        sequence_slice = SequenceSlice(rank % sharing, sharing, settings.positions_per_rank())
        who = f"groups of {sharing} ranks"
    rank = rank // sharing
    ranks = ranks // sharing
    batch_size = training.batch_size
    per_pass = batch_size * ranks
    global_batch = training.global_batch_size or per_pass * training.gradient_accumulation_steps
    # This variable is set if some nodes of the job are lost. The remaining nodes share the same global batch.
    if WANTED_NODES_VARIABLE in os.environ:
        if not training.global_batch_size:
            nodes = int(
                os.environ.get("GROUP_WORLD_SIZE", 1)
            )  # nodes on which torchrun has started ranks
            global_batch = global_batch * int(os.environ[WANTED_NODES_VARIABLE]) // nodes
        batch_size = math.gcd(batch_size, global_batch // ranks)
        per_pass = batch_size * ranks
    if global_batch % per_pass:
        raise UserError(
            f"global_batch_size={global_batch} is not a multiple of batch_size={batch_size} times "
            f"{ranks} {who}; set global_batch_size={round_up(global_batch, per_pass)}, another batch_size, or start another number of ranks"
        )
    return BatchShape(rank, ranks, batch_size, global_batch // per_pass, sequence_slice)


@dataclass(eq=False)
class Loader(ExitStack):
    """Reads this rank's micro-batches of every step.

    Step s consists of the samples [g * G, (g + 1) * G), where G is the global batch size of `batch_shape` and g = s -
    first_step. data.num_workers threads read up to data.prefetch steps ahead; without workers, `step` reads the data itself.
    The loader is a context manager; `close` stops the threads."""

    sources: Mapping[str, Source]
    sampler: Sampler  # the order of samples from `sources`
    data: DataConfig
    batch_shape: BatchShape
    vocab_size: int  # the vocabulary size of the model
    first_step: int = 0
    pin_memory: bool = False

    def __post_init__(self) -> None:
        super().__init__()

        self.ahead: dict[int, Future[list[Batch]]] = {}  # {step: its micro-batches}
        self.pool = None
        if self.data.num_workers:
            self.pool = ThreadPoolExecutor(self.data.num_workers, "loader")
            self.callback(self.pool.shutdown, cancel_futures=True)

    def step(self, step: int) -> list[Batch]:
        """Returns the micro-batches of a step. Any step can be read, but the threads read ahead only the steps that follow
        it. Raises UserError, with source and window in the message, if the data can't be read."""
        if not self.pool:
            return self._read(step)
        soon = set(range(step, step + self.data.prefetch + 1))
        for skipped_step in self.ahead.keys() - soon:
            self.ahead.pop(skipped_step).cancel()
        for next_step in sorted(soon - self.ahead.keys()):
            self.ahead[next_step] = self.pool.submit(self._read, next_step)
        return self.ahead.pop(step).result()

    def state_before(self, step: int) -> dict[str, Any]:
        """Returns the position in the data before `step`. Checkpoints save it, and Sampler(state=...) resumes from it."""
        return self.sampler.state_after((step - self.first_step) * self.batch_shape.global_batch)

    def _read(self, step: int) -> list[Batch]:
        shape = self.batch_shape
        size = shape.batch_size
        per_rank = shape.grad_accumulation_steps * size
        first = (step - self.first_step) * shape.global_batch + shape.rank * per_rank
        sources, windows = self.sampler.samples(first, per_rank)
        names = [self.sampler.names[source] for source in sources.tolist()]
        samples = list(zip(names, windows.tolist()))
        batches = []
        for start in range(0, per_rank, size):
            micro_batch = samples[start : start + size]
            batch = _batch(
                self.sources, micro_batch, self.data, self.vocab_size, self.data.seq_length
            )
            if shape.sequence_slice:
                batch = shape.sequence_slice.of(batch)
            if self.pin_memory:
                batch = batch.pin_memory()
            batches.append(batch)
        return batches


def evaluation_windows(token_count: int, seq_length: int, stride: int, limit: int) -> np.ndarray:
    """Returns the indices of windows that together predict each token of a source exactly once, except for its first token.

    Window w starts at token w * stride. Each window after the first one predicts only its last `stride` tokens, each from at
    least seq_length - stride tokens before it. limit: the number of windows to return, spread evenly; 0: all windows."""
    tokens_after_first = max(0, token_count - 1 - seq_length)
    windows = 1 + -(-tokens_after_first // stride)
    chosen = min(limit or windows, windows)
    return np.arange(chosen) * windows // chosen


def evaluation_batches(
    source: Source,
    name: str,
    data: DataConfig,
    batch_shape: BatchShape,
    *,
    vocab_size: int,
    limit: int,
    stride: int,
) -> Iterator[Batch]:
    """Yields this rank's batches of the windows from `evaluation_windows`, in the order of the source.

    The windows do not depend on the world size, and each token but the first is a label exactly once. All ranks get the same
    number of full batches, because all ranks of a sharded model take part in each forward pass. Batches are padded with rows
    in which all labels are IGNORED_LABEL. name: the name of the source, for Batch.samples and for messages. limit, stride:
    see evaluation_windows. Raises UserError if the source has fewer than two tokens."""
    if source.token_count < 2:
        raise UserError(
            f"source {name!r} has {format_count(source.token_count, 'token')}, too few to evaluate; give at least 2"
        )
    windows = evaluation_windows(source.token_count, data.seq_length, stride, limit).tolist()
    size = batch_shape.batch_size
    for first in range(0, len(windows), batch_shape.world_size * size):
        start = first + batch_shape.rank * size
        samples: list[Sample] = [(name, window) for window in windows[start : start + size]]
        samples += [(name, None)] * (size - len(samples))
        batch = _batch({name: source}, samples, data, vocab_size, stride)
        if batch_shape.sequence_slice:
            batch = batch_shape.sequence_slice.of(batch)
        yield batch


def _batch(
    sources: Mapping[str, Source],
    samples: Sequence[Sample],
    data: DataConfig,
    vocab_size: int,
    stride: int,
) -> Batch:
    """Reads these samples into a batch. Window w starts at token w * stride."""
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
        content = _read_window(sources[name], start, length, vocab_size, place)
        tokens[row, :length] = content.tokens[:-1]
        labels[row, :length] = content.tokens[1:]
        if window:
            # Do not count the tokens that earlier windows have already predicted.
            labels[row, : data.seq_length - stride] = IGNORED_LABEL
        if data.reset_at_documents:
            seq_idx[row, :length] = np.cumsum(_document_starts(content.positions)[:-1])
        if data.position_weighting:
            place_in_window = np.arange(length + 1)
            starts = np.where(_document_starts(content.positions), place_in_window, 0)
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


def _document_starts(positions: np.ndarray) -> np.ndarray:
    """Returns whether a document starts at each position of a window, as a bool array (n,). The value is False for the
    first position, because it makes no difference whether the first document began before the window."""
    return np.append(False, positions[1:] == 0)


def _read_window(source: Source, start: int, length: int, vocab_size: int, place: str) -> Tokens:
    """Reads the `length` tokens of a window and the token after it.

    place: describes the window in messages. Raises UserError if the tokens can't be read, or are not below `vocab_size`."""
    try:
        content = source.read(start, length + 1)
        if content.tokens.max() >= vocab_size:
            raise UserError(
                f"token id {content.tokens.max()} is not below the model's vocab_size {vocab_size}; "
                "set vocab_size to the tokenizer's vocabulary size, or tokenize the data with the model's tokenizer"
            )
    except Exception as error:
        kind = type(error) if isinstance(error, UserError) else UserError
        raise kind(f"{place}: {error}") from error
    return content
