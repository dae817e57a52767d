"""Documents become token ids, each ended by an eos: the tokenizers library encodes, on all cores."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from config.dataset_config import DatasetConfig
from mamba_fsdp.data.reading import Batch
from mamba_fsdp.data.tokenizer import TextTokenizer
from mamba_fsdp.errors import UserError

BATCH_SIZE = (1 << 20) * max(1, len(os.sched_getaffinity(0)) // 4)  # characters encoded at once


def encode(
    batches: Iterable[Batch], tokenizer: TextTokenizer, options: DatasetConfig
) -> Iterator[tuple[Batch, np.ndarray]]:
    """Yields (batch, its ids (n,) uint32) while the library encodes the next one. Raises UserError for ids that the
    tokenizer does not have."""
    if tokenizer.backend:
        # Text that spells a special token, as a page about tokenizers does, is text.
        tokenizer.backend.encode_special_tokens = True
    before = None
    with ThreadPoolExecutor(1) as thread:
        for batch in batches:
            now = batch, thread.submit(_encode_texts, batch, tokenizer)
            if before:
                yield before[0], _ids(before[0], before[1].result(), tokenizer, options)
            before = now
        if before:
            yield before[0], _ids(before[0], before[1].result(), tokenizer, options)


def _encode_texts(batch, tokenizer):
    texts = [each.content for each in batch.documents if isinstance(each.content, str)]
    if not texts:
        return []
    if not tokenizer.backend:
        raise UserError(
            "the input holds text, and --tokenizer=none is for token ids; name their column with "
            "--text_column, or another tokenizer"
        )
    return tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)


def _ids(batch, encodings, tokenizer, options):
    encoded = iter(encodings)
    adds_eos = options.pack == "document"
    separators = [*map(int, options.strip_tokens), tokenizer.eos]
    if tokenizer.bos is not None:
        separators.append(tokenizer.bos)
    parts = [np.zeros(0, np.int64)]
    for document in batch.documents:
        ids = document.content
        if isinstance(ids, str):
            ids = np.array(next(encoded).ids, dtype=np.uint32)
            # Of vocabularies that hold the eos as a plain word: it must not cut the document.
            ids = ids[ids != tokenizer.eos]
        else:
            _check_ids(ids, tokenizer.vocab_size)
            if adds_eos:
                ids = _stripped(document, separators)
        parts.append(ids)
        if document.ends and adds_eos:
            parts.append(np.array([tokenizer.eos]))
    return np.concatenate(parts).astype(np.uint32)


def _stripped(document, separators):
    """Its ids without the separators that stand at its ends."""
    ids = document.content
    others = np.flatnonzero(~np.isin(ids, separators))
    first = 0
    end = len(ids)
    if document.begins:
        first = others[0] if len(others) else end
    if document.ends:
        end = others[-1] + 1 if len(others) else first
    return ids[first:end]


def _check_ids(ids, size):
    if len(ids) and (ids.min() < 0 or ids.max() >= size):
        raise UserError(
            f"token ids from {ids.min()} to {ids.max()}, but there are {size}; name the tokenizer that "
            "made them with --tokenizer, or the --vocab_size where there is none"
        )
