"""Made-up tokens without files, for benchmarks: a Source that counts up through the vocabulary, again and again."""

from pathlib import Path

import numpy as np

from mamba_fsdp.data.source import Tokens
from mamba_fsdp.errors import UserError

TOKENS = 1 << 50  # more than any run reads


class DummySource:
    """Documents of vocab_size tokens, 0, 1, 2, ... each."""

    path, format, token_count, eos, tokenizer = Path("dummy"), "made-up tokens", TOKENS, -1, ""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.identity = vocab_size, f"dummy:{vocab_size}"
        self.document_count = TOKENS // vocab_size

    @property
    def tokenizer_path(self) -> Path:
        raise UserError("made-up tokens have no tokenizer")

    def read(self, start: int, count: int) -> Tokens:
        tokens = np.arange(start, start + count) % self.vocab_size
        return Tokens(tokens, tokens.astype(np.int32), None)
