"""Counts the words and bytes of the text of tokens. With them, losses of models with different tokenizers can be compared."""

import math
from collections.abc import Iterable

import numpy as np

from mamba_fsdp.data.source import Source
from mamba_fsdp.data.tokenizer import load_for_prompts
from mamba_fsdp.errors import UserError

TOKENS_PER_CHUNK = 1 << 16  # the number of tokens to decode at a time


def bits_per_byte(loss: float, tokens: int, size: float) -> float | None:
    """Converts a mean loss to bits per byte.

    loss: in nats per token. tokens: the number of tokens. size: the size of their text in bytes. Returns None if
    `size` is 0."""
    return loss * tokens / math.log(2) / size if size else None


def predicted_spans(
    windows: np.ndarray, window: int, stride: int, token_count: int
) -> list[tuple[int, int]]:
    """Returns (start, end) for each contiguous range of tokens that the windows predict.

    windows: their indices, see evaluation_windows. window: the number of tokens in a window. stride: the number
    of tokens from the start of one window to the start of the next. token_count: the number of tokens in the source."""
    spans: list[tuple[int, int]] = []
    for number in windows.tolist():
        window_end = number * stride + window + 1
        start = window_end - stride if number else 1  # the first token is never predicted
        end = min(window_end, token_count)
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, end))
    return spans


def count_words_and_bytes(source: Source, spans: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Counts the words and bytes in the text of the tokens in `spans`.

    Words are separated by white space, as in the word-level perplexity of WikiText. Special tokens, such as the one that ends
    a document, are not counted. spans: (start, end) pairs. Returns (number of words, number of bytes), or (0, 0) if the source
    has no tokenizer.
    """
    try:
        tokenizer = load_for_prompts(source.tokenizer_path).backend
    except UserError:  # the store has no tokenizer
        return 0, 0
    words = size = 0
    for start, end in spans:
        # The beginning of a document that continues in the next chunk.
        unfinished = np.empty(0, np.int64)
        for at in range(start, end, TOKENS_PER_CHUNK):
            tokens = source.read(at, min(TOKENS_PER_CHUNK, end - at)).tokens
            tokens = np.concatenate([unfinished, tokens])
            unfinished = unfinished[:0]
            documents = np.split(tokens, np.flatnonzero(tokens == source.eos) + 1)
            if len(documents) > 1 and at + TOKENS_PER_CHUNK < end:
                unfinished = documents.pop()
            texts = tokenizer.decode_batch(
                [document.tolist() for document in documents], skip_special_tokens=True
            )
            for text in texts:
                words += len(text.split())
                size += len(text.encode())
    return words, size
