"""Evaluates a trained model over a token store: token loss, perplexities, bits per byte."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.data.text import count_words_and_bytes, predicted_spans
from mamba_fsdp.data.tokenizer import check_tokenizer, import_with
from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import condition, setting
from mamba_fsdp.reporting.console import Console
from mamba_fsdp.settings.train_config import DataConfig

if TYPE_CHECKING:
    from mamba_fsdp.inference.loading import Loaded

MOST_IN_FULL = 10**6
POSITIONS = {"cpu": 1 << 14, "cuda": 1 << 18}  # of a forward pass, unless one window has more


@condition("DATA (instead of --tasks)")
def by_data(options: Any) -> bool:
    return not getattr(options, "tasks", [])  # only the command has this option


@dataclass
class EvaluationConfig:
    """The options of an evaluation over a store."""

    seq_length: int = setting(
        2048, at_least=1, elsewhere="max_seq_length max_length seq_len block_size context_length"
    )
    """Tokens per window: more context, lower loss, more memory. The default is the same for every model, whatever length
    it was trained with. A longer context of a task loses its beginning."""
    stride: int = setting(0, at_least=0, needs=by_data, elsewhere="doc_stride")
    """Tokens from the start of one window to the start of the next; 0: seq_length, without overlap. With a
    smaller stride, each token has at least seq_length - stride tokens before it, and the work grows by a
    factor of seq_length / stride."""
    batch_size: int = setting(8, at_least=1, elsewhere="eval_batch_size per_device_eval_batch_size")
    """Windows per forward pass, fewer if they are long; the most texts of a task."""
    limit: int = setting(0, at_least=0, elsewhere="max_eval_samples num_samples eval_batches")
    """Number of windows, spread evenly over the data, or of the first questions of each task; 0: all."""
    reset_at_documents: bool = setting(False, needs=by_data)
    """Keep state, convolution and attention within a document: none crosses the start of a document."""
    allow_other_tokenizer: bool = setting(False, needs=by_data)
    """Accept data with another tokenizer than the model's."""


@dataclass
class Evaluation:
    """The measures of how well a model predicts a store's tokens.

    word_perplexity and bits_per_byte are None if no tokenizer is known.
    """

    tokens: int  # predicted tokens
    all_tokens: int  # tokens of the store without the first, which nothing predicts
    loss: float  # nats per token
    perplexity: float  # per token
    words: int  # between white space in the text of the predicted tokens; 0 without a tokenizer
    word_perplexity: float | None  # exp(nats of all predicted tokens / words)
    bytes: int  # of the text of the predicted tokens
    bits_per_byte: float | None
    seconds: float
    window: int  # tokens in a window
    stride: int  # tokens from the start of one window to the start of the next

    def lines(self) -> list[str]:
        """Returns the lines to print."""
        perplexity = f"{_shown(self.perplexity)} per token"
        if self.word_perplexity:
            perplexity += f", {_shown(self.word_perplexity)} per word ({self.words:,} words between white space)"
        lines = [
            f"tokens         {self.tokens:,} of {self.all_tokens:,}",
            f"windows        {self.window:,} tokens long, one every {self.stride:,}",
            f"loss           {self.loss:.4f} nats per token",
            f"perplexity     {perplexity}",
        ]
        if self.bytes:
            lines.append(f"bits per byte  {self.bits_per_byte:.4f} ({self.bytes:,} bytes)")
        lines.append(f"speed          {self.tokens / self.seconds:,.0f} tokens/s")
        return lines


def evaluate(
    model: "Loaded | str | Path", data: str | Path, options: EvaluationConfig
) -> Evaluation:
    """Returns the Evaluation of a model over the token store at the path `data`: its loss,
    perplexities and bits per byte. model: what `load` returns, or a path that it takes. Raises UserError as `measure`
    does."""
    from mamba_fsdp.inference.loading import as_loaded

    return measure(as_loaded(model), data, options, Console(enabled=False))


def measure(
    model: "Loaded", data: str | Path, options: EvaluationConfig, console: Console
) -> Evaluation:
    """Returns the Evaluation of a model over a store, and shows the progress on the console. All ranks call it.

    Raises UserError if there is no store, or if the model and the store have different tokenizers.
    """
    from mamba_fsdp.data.loader import BatchShape, evaluation_batches, evaluation_windows
    from mamba_fsdp.inference.loading import inference_world
    from mamba_fsdp.trainer.validation import sum_losses

    began = time.perf_counter()
    if options.stride > options.seq_length:
        raise UserError(
            f"--stride={options.stride} is longer than --seq_length={options.seq_length}: tokens between two "
            "windows would be left out"
        )
    store = TokenStore(data)
    if not options.allow_other_tokenizer:
        identities = model.weights.tokenizer_identities()
        check_tokenizer(data, store.tokenizer, model.weights.source, identities)
    vocab_size = model.weights.config.vocab_size
    if store.vocab_size > vocab_size:
        raise UserError(
            f"{data} has a vocabulary of {store.vocab_size}, the model one of {vocab_size}; "
            f"{import_with(model.weights.tokenizer_path)}"
        )
    world = inference_world()
    window = max(1, min(options.seq_length, store.token_count - 1))
    stride = min(options.stride or window, window)
    fitting = max(1, POSITIONS[world.device.type] // window)
    batch_shape = BatchShape(world.rank, world.size, min(options.batch_size, fitting))
    settings = DataConfig(seq_length=window, reset_at_documents=model.network.reset_at_documents)
    windows = evaluation_windows(store.token_count, window, stride, options.limit)
    batches = evaluation_batches(
        store,
        str(data),
        settings,
        batch_shape,
        vocab_size=vocab_size,
        limit=options.limit,
        stride=stride,
    )
    spans = predicted_spans(windows, window, stride, store.token_count)
    wanted = sum(end - start for start, end in spans)

    def show(tokens: int) -> bool:
        console.passing(f"{min(1.0, tokens * world.size / wanted):.0%} read")
        return False

    sums = sum_losses(model.network, batches, world, show)
    assert sums is not None  # show never stops it
    counts = count_words_and_bytes(store, spans[world.rank :: world.size])
    words, size = world.all_reduce_sum(list(counts))
    loss, tokens, bits = sums.measure(size)
    nats = loss * tokens
    return Evaluation(
        tokens=tokens,
        all_tokens=store.token_count - 1,
        loss=loss,
        perplexity=_exp(loss),
        words=int(words),
        word_perplexity=_exp(nats / words) if words else None,
        bytes=int(size),
        bits_per_byte=bits,
        seconds=time.perf_counter() - began,
        window=window,
        stride=stride,
    )


def _shown(perplexity: float) -> str:
    """Returns a perplexity to print: from a million on, as that of words can be, as 4.2e+40."""
    return f"{perplexity:,.3f}" if perplexity < MOST_IN_FULL else f"{perplexity:.1e}"


def _exp(number: float) -> float:
    return math.exp(min(number, 700.0))  # exp of more overflows
