"""Documents become token ids, each ended by an eos: the tokenizers library encodes, on all cores."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from config.dataset_config import DatasetConfig
from mamba_fsdp.data.reading import Batch, Document
from mamba_fsdp.data.tokenizer import TextTokenizer
from mamba_fsdp.errors import UserError

BATCH_SIZE = (1 << 20) * max(1, len(os.sched_getaffinity(0)) // 4)  # characters encoded at once


class Encoder:
    """Turns batches of documents into arrays of token ids. A context manager."""

    def __init__(self, tokenizer: TextTokenizer, options: DatasetConfig, adds_eos: bool) -> None:
        """adds_eos: behind each document; else ids are taken as they are."""
        self.tokenizer = tokenizer
        self.adds_eos = adds_eos
        self.is_open = False  # the last document has not ended yet
        self._strip = {int(token) for token in options.strip_tokens}
        for token in (tokenizer.bos, tokenizer.eos):
            if token is not None:
                self._strip.add(token)
        self._thread = ThreadPoolExecutor(1)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        if tokenizer.backend:
            # Text that spells a special token, as a page about tokenizers does, is text.
            tokenizer.backend.encode_special_tokens = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._thread.shutdown(cancel_futures=True)

    def encode(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        """Yields (batch, its ids (n,) uint32) while the library encodes the next one. Each eos ends a document, none is
        empty. Raises UserError for ids that the tokenizer does not have."""
        waiting: list[tuple[Batch, Future]] = []
        for batch in batches:
            texts = [each.content for each in batch.documents if isinstance(each.content, str)]
            waiting.append((batch, self._thread.submit(self._encode_texts, texts)))
            if len(waiting) > 1:
                before, future = waiting.pop(0)
                yield before, self._ids(before.documents, future.result())
        for before, future in waiting:
            yield before, self._ids(before.documents, future.result())

    def _encode_texts(self, texts):
        if not texts:
            return []
        if not self.tokenizer.backend:
            raise UserError(
                "the input holds text, and --tokenizer=none is for token ids; name their column with "
                "--text_column, or another tokenizer"
            )
        return self.tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)

    def _ids(self, documents: list[Document], encodings: list) -> np.ndarray:
        found = iter(encodings)
        parts = []
        end = np.array([self.tokenizer.eos], dtype=np.int64)
        for document in documents:
            if isinstance(document.content, str):
                ids = np.array(next(found).ids, dtype=np.uint32)
                # Of vocabularies that hold the eos as a plain word: it must not cut the document.
                ids = ids[ids != self.tokenizer.eos]
            else:
                ids = self._checked(document.content)
                if self.adds_eos:
                    ids = self._stripped(ids, not self.is_open, document.ends)
            self.is_open = not document.ends
            parts.append(ids)
            if document.ends and self.adds_eos:
                parts.append(end)
        return np.concatenate(parts).astype(np.uint32) if parts else np.zeros(0, np.uint32)

    def _stripped(self, ids, at_begin, at_end):
        """Without the separators that stand at a document's ends."""
        kept = np.flatnonzero(~np.isin(ids, list(self._strip)))
        if not len(kept):
            return ids[:0] if at_begin and at_end else ids
        first = kept[0] if at_begin else 0
        end = kept[-1] + 1 if at_end else len(ids)
        return ids[first:end]

    def _checked(self, ids):
        size = self.tokenizer.vocab_size
        if len(ids) and (ids.min() < 0 or ids.max() >= size):
            remedy = "name the one that made them with --tokenizer"
            if not self.tokenizer.backend:
                remedy = "give another --vocab_size"
            raise UserError(
                f"token ids from {ids.min()} to {ids.max()}, but there are {size}; {remedy}"
            )
        return ids
