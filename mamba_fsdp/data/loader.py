"""Batches: the windows that the order names, read ahead by threads and cut into this rank's micro batches.

The content of a step depends on the order and the global batch only: ranks and micro batches are slices of it, and
threads only decide when it is read.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from mamba_fsdp.errors import UserError

NOT_COUNTED = -100  # label of a token that the loss leaves out


class Batch(NamedTuple):
    tokens: torch.Tensor  # (batch, seq_length) int64
    labels: torch.Tensor  # (batch, seq_length) int64: the next token, or NOT_COUNTED
    documents: torch.Tensor | None  # (batch, seq_length) int32, 0 for a row's first document; or None
    samples: list  # (source name, window) of each row, for messages

    def to(self, device):
        moved = (None if tensor is None else tensor.to(device, non_blocking=True) for tensor in self[:3])
        return Batch(*moved, self.samples)


class Loader:
    """This rank's micro batches of every step.

    sources: {name: source}, each with `read(start, count)` -> (tokens, positions, mask or None); order: the Order of
    these sources. Step s takes samples [g*G, (g+1)*G) of the order, g = s - first_step, G = world_size * micro_batches
    * batch_size; a step is cut by rank, then by micro batch. num_workers threads read up to `prefetch` steps ahead (0
    workers: `step` itself reads). A context manager; `close` stops the threads.
    """

    def __init__(self, sources, order, *, rank, world_size, batch_size, micro_batches, vocab_size, first_step=0,
                 num_workers=1, prefetch=2, reset_at_documents=False, pin_memory=False):
        self.sources, self.order = sources, order
        self.rank, self.batch_size, self.micro_batches = rank, batch_size, micro_batches
        self.global_batch = world_size * micro_batches * batch_size
        self.first_step, self.prefetch = first_step, prefetch
        self.make = dict(vocab_size=vocab_size, reset_at_documents=reset_at_documents, pin_memory=pin_memory)
        self.pool = ThreadPoolExecutor(num_workers, "loader") if num_workers else None
        self.ahead = {}  # step -> future of its micro batches

    def step(self, step):
        """The micro batches of a step, a list of Batch. Any step may be asked for; in a row they have been read ahead.

        Raises UserError that names source and window where one can't be read.
        """
        if not self.pool:
            return self._read(step)
        for other in set(self.ahead) - set(range(step, step + self.prefetch + 1)):
            self.ahead.pop(other).cancel()
        for wanted in range(step, step + self.prefetch + 1):
            if wanted not in self.ahead:
                self.ahead[wanted] = self.pool.submit(self._read, wanted)
        return self.ahead.pop(step).result()

    def state_before(self, step):
        """The data's position when `step` comes next: what a checkpoint saves, and Order(state=...) takes."""
        return self.order.state_after((step - self.first_step) * self.global_batch)

    def _read(self, step):
        mine = self.micro_batches * self.batch_size
        first = (step - self.first_step) * self.global_batch + self.rank * mine
        source, window, _ = self.order.samples(first, mine)
        samples = [(self.order.names[s], w) for s, w in zip(source.tolist(), window.tolist())]
        return [_batch(self.sources, samples[at : at + self.batch_size], self.order.seq_length, **self.make)
                for at in range(0, mine, self.batch_size)]

    def close(self):
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def evaluation_batches(source, name, *, seq_length, batch_size, rank, world_size, vocab_size, limit=None,
                       reset_at_documents=False, pin_memory=False):
    """Yield this rank's batches over a source in its own order: all of it, or `limit` windows spread evenly over it.

    The windows are the same for every world size, and each token but the first is a label exactly once. All ranks get
    the same number of full batches, as sharded models need: rows that are too many, and the end of a last window that
    is shorter, have no label that counts.
    """
    windows = -(-(source.token_count - 1) // seq_length)
    if windows < 1:
        raise UserError(f"source {name!r} has {source.token_count} tokens: nothing to evaluate")
    chosen = windows if limit is None else min(limit, windows)
    for first in range(0, chosen, world_size * batch_size):
        at = first + rank * batch_size + np.arange(batch_size)
        spread = (at * windows // chosen).tolist()
        samples = [(name, window if place < chosen else None) for place, window in zip(at, spread)]
        yield _batch({name: source}, samples, seq_length, vocab_size, reset_at_documents, pin_memory)


def _batch(sources, samples, seq_length, vocab_size, reset_at_documents, pin_memory):
    shape = (len(samples), seq_length)
    tokens, labels = np.zeros(shape, np.int64), np.full(shape, NOT_COUNTED, np.int64)
    documents = np.zeros(shape, np.int32) if reset_at_documents else None
    for row, (name, window) in enumerate(samples):
        if window is None:
            continue
        source, start = sources[name], window * seq_length
        length = min(seq_length, source.token_count - 1 - start)
        try:
            window_tokens, positions, mask = source.read(start, length + 1)
            if window_tokens.max() >= vocab_size:
                raise UserError(f"token id {window_tokens.max()} is not below the model's vocab_size {vocab_size}; "
                                "set vocab_size to the tokenizer's, or tokenise with the model's tokenizer")
        except Exception as error:
            place = f"source {name!r}, window {window} (tokens {start} to {start + length})"
            raise UserError(f"{place}: {error}") from error
        tokens[row, :length] = window_tokens[:-1]
        labels[row, :length] = window_tokens[1:]
        if mask is not None:
            labels[row, :length][~mask[1:]] = NOT_COUNTED
        if reset_at_documents:
            starts = positions[:-1] == 0
            starts[0] = False  # a row begins with document 0, wherever in it the window begins
            documents[row, :length] = np.cumsum(starts)
    tensors = [None if array is None else torch.from_numpy(array) for array in (tokens, labels, documents)]
    if pin_memory:
        tensors = [None if tensor is None else tensor.pin_memory() for tensor in tensors]
    return Batch(*tensors, samples)
