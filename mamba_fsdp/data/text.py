"""Counts the words and bytes that a store's tokens stand for, by which losses of different tokenizers compare."""

import math
from collections.abc import Iterable

import numpy as np

from mamba_fsdp.data.source import Source
from mamba_fsdp.data.tokenizer import load_words
from mamba_fsdp.errors import UserError

DECODED_AT_ONCE = 1 << 16  # tokens


def bits_per_byte(loss: float, tokens: int, size: float) -> float | None:
    """Returns the bits per byte of `tokens` tokens with a mean `loss` in nats, if their text has `size` bytes; None if
    `size` is 0."""
    return loss * tokens / math.log(2) / size if size else None


def predicted_spans(
    windows: np.ndarray, window: int, stride: int, token_count: int
) -> list[tuple[int, int]]:
    """Returns (start, end) of each range of tokens that the windows predict. windows: their numbers."""
    spans: list[tuple[int, int]] = []
    for number in windows.tolist():
        window_end = number * stride + window + 1
        start = window_end - stride if number else 1  # nothing predicts the first token
        end = min(window_end, token_count)
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, end))
    return spans


def count_words_and_bytes(source: Source, spans: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Returns (words, bytes) in the text of the tokens in these spans, each (start, end); (0, 0) without a tokenizer.

    Words are separated by white space, as in the word-level perplexity of WikiText; ends of documents and other special
    tokens are not words.
    """
    try:
        tokenizer = load_words(source.tokenizer_path).backend
    except UserError:  # the store has no tokenizer
        return 0, 0
    words = size = 0
    for start, end in spans:
        unfinished = np.empty(0, np.int64)  # the beginning of a document
        for at in range(start, end, DECODED_AT_ONCE):
            tokens = source.read(at, min(DECODED_AT_ONCE, end - at)).tokens
            tokens = np.concatenate([unfinished, tokens])
            unfinished = unfinished[:0]
            documents = np.split(tokens, np.flatnonzero(tokens == source.eos) + 1)
            if len(documents) > 1 and at + DECODED_AT_ONCE < end:
                unfinished = documents.pop()
            texts = tokenizer.decode_batch(
                [document.tolist() for document in documents], skip_special_tokens=True
            )
            for text in texts:
                words += len(text.split())
                size += len(text.encode())
    return words, size
