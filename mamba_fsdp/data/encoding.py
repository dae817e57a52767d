"""Documents become token ids, each ended by an eos: the tokenizers library encodes, on all cores."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from config.dataset_config import DatasetConfig
from mamba_fsdp.data.reading import Batch
from mamba_fsdp.data.tokenizer import TextTokenizer
from mamba_fsdp.errors import UserError

BATCH_SIZE = (1 << 20) * max(1, len(os.sched_getaffinity(0)) // 4)  # characters encoded at once


class Encoder:
    """Turns batches of documents into arrays of token ids."""

    def __init__(self, tokenizer: TextTokenizer, options: DatasetConfig, is_open: bool) -> None:
        """is_open: the batches begin within a document."""
        self.tokenizer = tokenizer
        self.adds_eos = options.pack == "document"
        self.is_open = is_open
        separators = [*map(int, options.strip_tokens), tokenizer.eos, tokenizer.bos]
        self._separators = [token for token in separators if token is not None]
        if tokenizer.backend:
            # Text that spells a special token, as a page about tokenizers does, is text.
            tokenizer.backend.encode_special_tokens = True

    def encode(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        """Yields (batch, its ids (n,) uint32) while the library encodes the next one. Raises UserError for ids that the
        tokenizer does not have."""
        before: tuple[Batch, Future] | None = None
        with ThreadPoolExecutor(1) as thread:
            for batch in batches:
                now = thread.submit(self._encode_texts, batch)
                if before:
                    yield before[0], self._ids(before[0], before[1].result())
                before = batch, now
            if before:
                yield before[0], self._ids(before[0], before[1].result())

    def _encode_texts(self, batch):
        texts = [each.content for each in batch.documents if isinstance(each.content, str)]
        if not texts:
            return []
        if not self.tokenizer.backend:
            raise UserError(
                "the input holds text, and --tokenizer=none is for token ids; name their column with "
                "--text_column, or another tokenizer"
            )
        return self.tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)

    def _ids(self, batch: Batch, encodings: list) -> np.ndarray:
        encoded = iter(encodings)
        eos = np.array([self.tokenizer.eos])
        parts = [np.zeros(0, np.int64)]
        for content, ends in batch.documents:
            if isinstance(content, str):
                ids = np.array(next(encoded).ids, dtype=np.uint32)
                # Of vocabularies that hold the eos as a plain word: it must not cut the document.
                ids = ids[ids != self.tokenizer.eos]
            else:
                ids = self._checked(content)
                if self.adds_eos:
                    ids = self._stripped(ids, not self.is_open, ends)
            parts.append(ids)
            if ends and self.adds_eos:
                parts.append(eos)
            self.is_open = not ends
        return np.concatenate(parts).astype(np.uint32)

    def _stripped(self, ids, at_begin, at_end):
        """Without the separators that stand at a document's ends."""
        others = np.flatnonzero(~np.isin(ids, self._separators))
        first = 0
        end = len(ids)
        if at_begin:
            first = others[0] if len(others) else end
        if at_end:
            end = others[-1] + 1 if len(others) else first
        return ids[first:end]

    def _checked(self, ids):
        size = self.tokenizer.vocab_size
        if len(ids) and (ids.min() < 0 or ids.max() >= size):
            raise UserError(
                f"token ids from {ids.min()} to {ids.max()}, but there are {size}; name the tokenizer that "
                "made them with --tokenizer, or the --vocab_size where there is none"
            )
        return ids
