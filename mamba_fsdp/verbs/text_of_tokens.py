"""How many words and bytes of text tokens stand for: what makes perplexities of different tokenizers comparable."""

import numpy as np

from mamba_fsdp.data.source import Source
from mamba_fsdp.data.tokenizer import load_for_transformers
from mamba_fsdp.errors import UserError

DECODED = 1 << 16  # tokens at a time


class TextOfTokens:
    """Counts words and bytes of the text of tokens, given in their order. Words are what stands between white space, as
    in the word-level perplexity of WikiText; ends of documents and other special tokens are none."""

    def __init__(self, source: Source):
        self.words, self.bytes, self._eos, self._tokens = 0, 0, source.eos, np.zeros(0, dtype=np.int64)
        try:
            self._form = load_for_transformers(source.tokenizer_path)
        except UserError:  # the source came without
            self._form = None

    def add(self, tokens: np.ndarray) -> None:
        """tokens: (n,). Decodes when there are many, up to the end of a document if there is one: it cuts no word."""
        self._tokens = np.concatenate([self._tokens, tokens])
        if len(self._tokens) >= DECODED:
            ends: np.ndarray = np.flatnonzero(self._tokens == self._eos)
            self._count(int(ends[-1]) + 1 if len(ends) else len(self._tokens))

    def finish(self) -> None:
        """Decodes what is left."""
        self._count(len(self._tokens))

    def _count(self, end):
        ready, self._tokens = self._tokens[:end], self._tokens[end:]
        for part in np.split(ready, np.flatnonzero(ready == self._eos) + 1) if self._form else ():
            text = self._form.decode(part.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            self.words += len(text.split())
            self.bytes += len(text.encode())
