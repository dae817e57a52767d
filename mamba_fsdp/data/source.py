"""What the order of samples and the loader ask of data, whatever its format: a Source."""

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np


class Tokens(NamedTuple):
    tokens: np.ndarray  # (count,), the source's integer type, possibly a read-only view of a file
    positions: np.ndarray  # (count,) int32, each token's position within its document
    mask: np.ndarray | None  # (count,) bool, which tokens count in the loss; None means all


@runtime_checkable
class Source(Protocol):
    """One long sequence of tokens, documents laid end to end. data/store.py has the native one.

    Several threads read it at once, in any order. Two sources have equal identities just when all their tokens are
    equal: a run that resumes refuses a source whose identity has changed.
    """

    token_count: int
    identity: str
    vocab_size: int  # every token is below it
    eos: int  # the token that ends a document

    def read(self, start: int, count: int) -> Tokens:
        """Tokens [start, start + count), which lie within the source. Raises UserError for what can't be read."""
