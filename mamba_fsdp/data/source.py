"""Defines Source: what the order of samples and the loader need of data, whatever its format."""

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from mamba_fsdp.errors import UserError


class Tokens(NamedTuple):
    tokens: np.ndarray  # (count,), the source's integer type, possibly a read-only view of a file
    positions: np.ndarray  # (count,) int32, each token's position within its document


class Source(Protocol):
    """One long sequence of tokens, documents laid end to end. TokenStore in data/store.py reads one from files.

    Several threads read it at once, in any order. Two sources have equal identities exactly if all their tokens are
    equal: a run that resumes refuses a source that has changed its identity.
    """

    path: Path
    token_count: int
    identity: str
    vocab_size: int  # every token is below it
    eos: int  # the token that ends a document; -1: not known
    tokenizer: str  # its identity, see tokenizer.py; "": not known

    @property
    def tokenizer_path(self) -> Path:
        """Returns the tokenizer's folder. Raises UserError if none is known."""

    def read(self, start: int, count: int) -> Tokens:
        """Returns tokens [start, start + count), which lie within the source. Raises UserError for what can't be
        read."""


class DummySource:
    """Made-up tokens without files, for benchmarks: each document is 0, 1, 2, ... up to vocab_size - 1."""

    path = Path("dummy")
    eos = -1
    tokenizer = ""
    token_count = 1 << 50  # more than any run reads

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.identity = f"dummy:{vocab_size}"

    @property
    def tokenizer_path(self) -> Path:
        raise UserError("made-up tokens have no tokenizer")

    def read(self, start: int, count: int) -> Tokens:
        tokens = np.arange(start, start + count) % self.vocab_size
        return Tokens(tokens, tokens.astype(np.int32))
