"""What the order of samples and the loader ask of data, whatever its format: a Source."""

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from mamba_fsdp.errors import UserError


class Tokens(NamedTuple):
    tokens: np.ndarray  # (count,), the source's integer type, possibly a read-only view of a file
    positions: np.ndarray  # (count,) int32, each token's position within its document
    mask: np.ndarray | None  # (count,) bool, which tokens count in the loss; None means all


class Source(Protocol):
    """One long sequence of tokens, documents laid end to end. data/opening.py opens one of any format.

    Several threads read it at once, in any order. Two sources have equal identities just when all their tokens are
    equal: a run that resumes refuses a source whose identity has changed.
    """

    path: Path
    format: str  # for messages: token store, save_to_disk, ...
    token_count: int
    document_count: int  # 0: not known
    identity: str
    vocab_size: int  # every token is below it; 0: not known
    eos: int  # the token that ends a document; -1: not known
    tokenizer: str  # its identity, see tokenizer.py; "": not known

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer's folder, or its name on the Hugging Face Hub. Raises UserError where none is known."""

    def read(self, start: int, count: int) -> Tokens:
        """Tokens [start, start + count), which lie within the source. Raises UserError for what can't be read."""


def restart(positions: np.ndarray, at: np.ndarray) -> None:
    """Let `positions` (n,), which count on, count from 0 at each of the places `at`, which rise."""
    if len(at):
        lengths = (
            np.concatenate([at[1:], [len(positions)]]) - at
        )  # np.diff(append=...) takes several times as long
        positions[at[0] :] -= np.repeat(positions[at], lengths)


class DummySource:
    """Made-up tokens without files, for benchmarks: documents of vocab_size tokens, 0, 1, 2, ... each."""

    path = Path("dummy")
    format = "made-up tokens"
    eos = -1
    tokenizer = ""
    token_count = 1 << 50  # more than any run reads

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.identity = f"dummy:{vocab_size}"
        self.document_count = self.token_count // vocab_size

    @property
    def tokenizer_path(self) -> Path:
        raise UserError("made-up tokens have no tokenizer")

    def read(self, start: int, count: int) -> Tokens:
        tokens = np.arange(start, start + count) % self.vocab_size
        return Tokens(tokens, tokens.astype(np.int32), None)
