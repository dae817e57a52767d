"""python -m mamba_fsdp evaluate MODEL DATA [--seq_length=2048] [--batch_size=8] [--limit=0]

Token loss, perplexity per token and per word, and bits per byte of a model over a token store or tokens in another
format (docs/data.md), every token predicted once from those before it in its window; windows do not overlap. MODEL is a
run folder, a checkpoint, a consolidated.00.pth, or a transformers or state-spaces folder.

  --seq_length          tokens per window, as many as you like; more context, lower loss
  --batch_size          windows per forward pass, fewer where they are long
  --limit               windows in all, spread evenly over the data; 0 for all
  --reset_at_documents  let nothing cross the start of a document
  --tokenizer           of data that comes without one; by default the model's. How else to read data in other formats,
                        as in training: --eos_token, --bos_token, --strip_tokens, --col_name, --pack, --index_dir
  --allow_other_tokenizer  where you know that the model fits the tokens of another tokenizer than its own
  --model_name          the preset that MODEL is, where there is no config.json beside it
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np

from config.fields import Bounds
from config.train_config import USUAL_READING, ReadingConfig
from mamba_fsdp.errors import UserError
from mamba_fsdp.report.display import Display

if TYPE_CHECKING:
    from mamba_fsdp.data.source import Source
    from mamba_fsdp.verbs.loading import Loaded

DECODED = 1 << 16  # tokens at a time


class Evaluation(NamedTuple):
    tokens: int  # that were predicted
    of: int  # those of the store that can be
    loss: float  # nats per token
    words: int  # what stands between white space in the text of the predicted tokens; 0: no tokenizer is known
    bytes: int  # of that text
    seconds: float

    @property
    def word_perplexity(self) -> float | None:
        """exp(nats of all predicted tokens, ends of documents among them, over words): comparable between tokenizers.
        None where the words are not known."""
        return math.exp(min(self.loss * self.tokens / self.words, 700.0)) if self.words else None

    @property
    def bits_per_byte(self) -> float | None:
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None


def main(model: str, data: str, seq_length: Annotated[int, Bounds(at_least=1)] = 2048,
         batch_size: Annotated[int, Bounds(at_least=1)] = 8, limit: Annotated[int, Bounds(at_least=0)] = 0,
         reset_at_documents: bool = False, allow_other_tokenizer: bool = False, model_name: str = "",
         reading: ReadingConfig = USUAL_READING) -> None:
    from mamba_fsdp.data.opening import format_of, open_source
    from mamba_fsdp.verbs.loading import load

    if not format_of(Path(data)):
        open_source(data)  # a mistake there is known before the model is loaded
    display = Display()
    loaded = load(model, model_name=model_name, reset_at_documents=reset_at_documents)
    found = evaluate(loaded, data, seq_length=seq_length, batch_size=batch_size, limit=limit,
                     allow_other_tokenizer=allow_other_tokenizer, show=display.passing, **vars(reading))
    display.line(f"tokens         {found.tokens:,} of {found.of:,}")
    print(f"windows        {min(seq_length, found.of):,} tokens long, one every {min(seq_length, found.of):,}")
    print(f"loss           {found.loss:.4f} nats per token")
    print(f"perplexity     {math.exp(min(found.loss, 700.0)):,.3f} per token" + (
        f", {found.word_perplexity:,.3f} per word ({found.words:,} words between white space)" if found.words else ""))
    if found.bytes:
        print(f"bits per byte  {found.bits_per_byte:.4f} ({found.bytes:,} bytes)")
    print(f"speed          {found.tokens / found.seconds:,.0f} tokens/s")


def evaluate(model: "Loaded", data: str, *, seq_length: int = 2048, batch_size: int = 8, limit: int = 0,
             allow_other_tokenizer: bool = False, show: Callable[[str], None] = lambda text: None,
             **reading: Any) -> Evaluation:
    """The model over the data at this path; the options are those of the command above, and show what is told how far
    it is. reading: settings of DataConfig that say how to read it. Raises UserError."""

    from config.train_config import DataConfig
    from mamba_fsdp.conventions import IGNORED_LABEL
    from mamba_fsdp.data.loader import Split, evaluation_batches
    from mamba_fsdp.data.opening import format_of, open_source
    from mamba_fsdp.data.tokenizer import refuse_other_tokenizer
    from mamba_fsdp.parallel.world import start_world
    from mamba_fsdp.train import loop

    network, weights = model
    settings = DataConfig(reset_at_documents=network.reset_at_documents,
                          allow_other_tokenizer=allow_other_tokenizer, **reading)
    if not settings.tokenizer and format_of(Path(data)) and weights.tokenizer_path:
        settings.tokenizer = str(weights.tokenizer_path)
    tokens = open_source(data, settings)
    if not allow_other_tokenizer:
        refuse_other_tokenizer(data, tokens.tokenizer, weights.source, weights.tokenizer_identities())
    if tokens.vocab_size > weights.config.vocab_size:
        raise UserError(f"{data} has a vocabulary of {tokens.vocab_size}, the model one of "
                        f"{weights.config.vocab_size}: they don't belong together")
    text, read = TextOfTokens(tokens), 0

    def measured(batches):
        nonlocal read
        for batch in batches:
            show(f"{read:,} of {wanted:,} tokens read")
            labels = batch.labels[batch.labels != IGNORED_LABEL]
            read += len(labels)
            text.add(labels.cpu().numpy())
            yield batch

    began = time.perf_counter()
    seq_length = max(1, min(seq_length, tokens.token_count - 1))
    batch_size = max(1, min(batch_size, network.part // seq_length))
    settings.seq_length = seq_length
    batches = evaluation_batches(tokens, data, settings, Split(0, 1, batch_size), vocab_size=weights.config.vocab_size,
                                 limit=limit or None)
    wanted = min(tokens.token_count - 1, limit * seq_length or tokens.token_count)
    loss, count = loop.evaluate(network, measured(batches), start_world())
    text.finish()
    return Evaluation(count, tokens.token_count - 1, loss, text.words, text.bytes, time.perf_counter() - began)


class TextOfTokens:
    """Counts words and bytes of the text of tokens, given in their order. Words are what stands between white space, as
    in the word-level perplexity of WikiText; ends of documents and other special tokens are none."""

    def __init__(self, source: "Source"):
        from mamba_fsdp.data.tokenizer import load_for_transformers

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
