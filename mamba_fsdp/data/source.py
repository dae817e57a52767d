"""Defines Source, the interface through which the sampler and the loader read data of any format."""

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from mamba_fsdp.errors import UserError


class Tokens(NamedTuple):
    tokens: np.ndarray  # (count,), integers; it can be a read-only view of a file
    positions: np.ndarray  # (count,) int32, the position of each token within its document


class Source(Protocol):
    """One long sequence of tokens: the concatenated documents. TokenStore in data/store.py reads one from files.

    Several threads can read a source at the same time, in any order. Two sources have equal identities exactly if all their
    tokens are equal. A run can't resume with a source that has another identity than before.
    """

    path: Path
    token_count: int
    identity: str
    vocab_size: int  # larger than every token
    eos: int  # the token that ends a document; -1: unknown
    tokenizer: str  # the identity of the tokenizer, see tokenizer.py; "": unknown

    @property
    def tokenizer_path(self) -> Path:
        """Returns the folder of the tokenizer. Raises UserError if the source has no tokenizer."""

    def read(self, start: int, count: int) -> Tokens:
        """Returns the tokens [start, start + count). They must be within the source. Raises UserError if they can't be read."""


class DummySource:
    """Synthetic tokens without files, for benchmarks. Each document is 0, 1, 2, ... up to vocab_size - 1."""

    path = Path("dummy")
    eos = -1
    tokenizer = ""
    token_count = 1 << 50  # more than any run reads

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.identity = f"dummy:{vocab_size}"

    @property
    def tokenizer_path(self) -> Path:
        raise UserError(
            "the synthetic tokens of use_dummy_dataset have no tokenizer; give dataset_path instead"
        )

    def read(self, start: int, count: int) -> Tokens:
        tokens = np.arange(start, start + count) % self.vocab_size
        return Tokens(tokens, tokens.astype(np.int32))
