"""Evaluates a trained model on a token store: loss per token, perplexity per token and per word, bits per byte."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.data.text import count_words_and_bytes, predicted_spans
from mamba_fsdp.data.tokenizer import check_tokenizer, import_hint
from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import condition, setting
from mamba_fsdp.reporting.console import Console
from mamba_fsdp.settings.train_config import DataConfig

if TYPE_CHECKING:
    from mamba_fsdp.inference.loading import Loaded

DEFAULT_LENGTH = 2048  # tokens per window if the length of the training is unknown
MIN_SCIENTIFIC = 10**6  # larger perplexities are printed in scientific notation
# Maximum number of positions in a forward pass, unless a single window has more.
MAX_POSITIONS = {"cpu": 1 << 14, "cuda": 1 << 18}


@condition("DATA (instead of --tasks)")
def evaluates_data(options: Any) -> bool:
    return not getattr(options, "tasks", [])  # mamba_fsdp.evaluate has no option `tasks`


@dataclass
class EvaluationConfig:
    """The options of an evaluation on a token store."""

    seq_length: int = setting(
        0, at_least=0, elsewhere="max_seq_length max_length seq_len block_size context_length"
    )
    """Tokens per window. A longer window gives tokens more context, so the loss is lower, and takes more memory.
    0: the length that the model was trained with, or 2048 if that is unknown and with --tasks. A context of a task
    that is longer loses its beginning."""
    stride: int = setting(0, at_least=0, needs=evaluates_data, elsewhere="doc_stride")
    """Tokens from the start of one window to the start of the next; 0: seq_length, without overlap. With a
    smaller stride, each token has at least seq_length - stride tokens before it, and the work grows by a
    factor of seq_length / stride."""
    batch_size: int = setting(8, at_least=1, elsewhere="eval_batch_size per_device_eval_batch_size")
    """Windows per forward pass, or fewer if they are long. With --tasks: maximum number of texts per forward pass."""
    limit: int = setting(0, at_least=0, elsewhere="max_eval_samples num_samples eval_batches")
    """Number of windows, spread evenly over the data. With --tasks: number of questions of each task, from the first.
    0: all."""
    reset_at_documents: bool = setting(False, needs=evaluates_data)
    """Reset the state at the start of each document, so that no state, convolution or attention crosses it."""
    allow_other_tokenizer: bool = setting(False, needs=evaluates_data)
    """Accept data that was tokenized with a different tokenizer than the model's."""


@dataclass
class Evaluation:
    """The result of an evaluation: how well a model predicts the tokens of a store.

    word_perplexity and bits_per_byte are None if the store has no tokenizer.
    """

    tokens: int  # number of predicted tokens
    all_tokens: int  # tokens of the store that can be predicted: all except the first
    loss: float  # nats per token
    perplexity: float  # per token: exp(loss)
    words: int  # number of words in the predicted text, split at white space; 0 without a tokenizer
    word_perplexity: float | None  # exp(sum of the losses in nats / words)
    bytes: int  # number of bytes in the predicted text; 0 without a tokenizer
    bits_per_byte: float | None
    seconds: float
    window: int  # tokens in a window
    stride: int  # tokens from the start of one window to the start of the next

    def lines(self) -> list[str]:
        """Returns the lines to print."""
        perplexity = f"{_format_perplexity(self.perplexity)} per token"
        if self.word_perplexity:
            perplexity += f", {_format_perplexity(self.word_perplexity)} per word ({self.words:,} words between white space)"
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
    """Evaluates a model on a token store, and returns its loss, perplexities and bits per byte.

    model: the result of `load`, or a path that `load` accepts. data: the path of the token store. Raises UserError if
    the model can't be loaded, and in the cases that `measure` lists."""
    from mamba_fsdp.inference.loading import ensure_loaded

    return measure(ensure_loaded(model), data, options, Console(enabled=False))


def measure(
    model: "Loaded", data: str | Path, options: EvaluationConfig, console: Console
) -> Evaluation:
    """Evaluates a model on a token store, and shows the progress on the console. All ranks must call it; each evaluates
    a part of the windows.

    Raises UserError if the store can't be read or does not fit the model's tokenizer or vocabulary, or if the
    stride is longer than a window.
    """
    from mamba_fsdp.data.loader import BatchShape, evaluation_batches, evaluation_windows
    from mamba_fsdp.inference.loading import inference_world
    from mamba_fsdp.trainer.validation import sum_losses

    began = time.perf_counter()
    length = options.seq_length or model.weights.seq_length or DEFAULT_LENGTH
    if options.stride > length:
        raise UserError(
            f"--stride={options.stride} is longer than --seq_length={length}: tokens between two "
            "windows would be left out; set a smaller --stride"
        )
    store = TokenStore(data)
    if not options.allow_other_tokenizer:
        identities = model.weights.tokenizer_identities()
        check_tokenizer(data, store.tokenizer, model.weights.source, identities)
    vocab_size = model.weights.config.vocab_size
    if store.vocab_size > vocab_size:
        raise UserError(
            f"{data} has a vocabulary of {store.vocab_size} tokens, but the model only {vocab_size}; "
            f"{import_hint(model.weights.tokenizer_path)}"
        )
    world = inference_world()
    window = max(1, min(length, store.token_count - 1))
    stride = min(options.stride or window, window)
    fitting = max(1, MAX_POSITIONS[world.device.type] // window)
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
        console.show_progress(f"{min(1.0, tokens * world.size / wanted):.0%} read")
        return False

    sums = sum_losses(model.network, batches, world, show)
    assert sums is not None  # it is None only if `show` stops the evaluation
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


def _format_perplexity(perplexity: float) -> str:
    """Formats a perplexity. The perplexity per word can be very large, so large values look like 4.2e+40."""
    return f"{perplexity:,.3f}" if perplexity < MIN_SCIENTIFIC else f"{perplexity:.1e}"


def _exp(number: float) -> float:
    return math.exp(min(number, 700.0))  # a larger exponent overflows
