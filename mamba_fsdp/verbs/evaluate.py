"""python -m mamba_fsdp evaluate MODEL DATA [--OPTION=VALUE ...]
python -m mamba_fsdp evaluate MODEL --tasks=NAME,... [--OPTION=VALUE ...]

Measure a model. MODEL is a run folder, a checkpoint, a consolidated.00.pth,
or a transformers or state-spaces folder (docs/evaluating.md).

By DATA: token loss, perplexity per token and per word, and bits per byte.
Every token is predicted once, from the tokens before it in its window. DATA is
a token store, or a folder with stores in validation/ or test/; get_dataset.py
makes stores from text. Under torchrun, the ranks share the work.

By --tasks: what lm-evaluation-harness measures, where lm-eval is installed.
Its results are printed, and kept as lm_eval_TIME.json if MODEL is a run folder.
"""

import importlib.util
import math
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mamba_fsdp.data.store import SPLITS, TokenStore, is_store, near_path
from mamba_fsdp.data.text import bits_per_byte, count_words_and_bytes, predicted_spans
from mamba_fsdp.data.tokenizer import check_tokenizer, import_with
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.places import check_place
from mamba_fsdp.report.console import Console, as_json
from mamba_fsdp.run_layout import TOKENIZER
from mamba_fsdp.settings.fields import setting
from mamba_fsdp.settings.train_config import DataConfig

if TYPE_CHECKING:
    from mamba_fsdp.verbs.loading import Loaded

POSITIONS = {"cpu": 1 << 14, "cuda": 1 << 18}  # of a forward pass, unless one window has more
# Options that only one of the two ways of measuring has.
OF_DATA = ("stride", "reset_at_documents", "allow_other_tokenizer")
OF_TASKS = ("num_fewshot", "include_path", "tokenizer")


@dataclass
class EvaluationConfig:
    """The options of an evaluation over a store."""

    seq_length: int = setting(
        2048, at_least=1, elsewhere="max_seq_length max_length seq_len block_size context_length"
    )
    """Tokens per window: more context, lower loss, more memory. A longer context of a task loses its beginning."""
    stride: int = setting(0, at_least=0, elsewhere="doc_stride")
    """Tokens from the start of one window to the start of the next; 0: seq_length, without overlap. With a
    smaller stride, each token has at least seq_length - stride tokens before it, and the work grows by a
    factor of seq_length / stride."""
    batch_size: int = setting(8, at_least=1, elsewhere="eval_batch_size per_device_eval_batch_size")
    """Windows per forward pass, fewer if they are long; the most texts of a task."""
    limit: int = setting(0, at_least=0, elsewhere="max_eval_samples num_samples eval_batches")
    """Number of windows, spread evenly over the data, or of the first questions of each task; 0: all."""
    reset_at_documents: bool = setting(False)
    """Keep state, convolution and attention within a document: none crosses the start of a document."""
    allow_other_tokenizer: bool = setting(False)
    """Accept data with another tokenizer than the model's."""


@dataclass
class CommandConfig(EvaluationConfig):
    """The options of the command besides the model and the data."""

    tasks: list[str] = setting([], elsewhere="task")
    """Tasks and groups of lm-evaluation-harness, as in lambada_openai,hellaswag; lm_eval ls tasks lists them."""
    num_fewshot: int = setting(-1, at_least=-1)
    """Solved questions before each question of a task; -1: the task's own number."""
    include_path: str = setting("", is_path=True)
    """Folder of further task files, your own."""
    tokenizer: str = setting("", elsewhere="tokenizer_path tokenizer_name")
    """Folder of a tokenizer for tasks, if MODEL has none."""
    json: bool = setting(False)
    """Print the numbers as JSON on stdout, everything else on stderr."""
    model_name: str = setting("", elsewhere="model_variant")
    """MODEL's preset, if there is no config.json beside it."""


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
        perplexity = f"{self.perplexity:,.3f} per token"
        if self.word_perplexity:
            perplexity += (
                f", {self.word_perplexity:,.3f} per word ({self.words:,} words between white space)"
            )
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


def main(model: str, data: str = "", *, options: CommandConfig) -> None:
    check_place(model)
    if bool(data) == bool(options.tasks):
        raise UserError("measure the model either by DATA or by --tasks=NAME,...")
    for name in OF_TASKS if data else OF_DATA:
        if getattr(options, name) != getattr(CommandConfig, name):
            raise UserError(f"--{name} does nothing by {'DATA' if data else '--tasks'}")
    # Both ways import torch; a missing path is reported earlier.
    if options.tasks:
        if importlib.util.find_spec("lm_eval") is None:
            raise UserError(
                "--tasks needs a package that is not installed: .venv/bin/python -m pip install -r "
                "requirements/lm-eval.txt"
            )
        from mamba_fsdp.verbs.harness import run_tasks

        return run_tasks(model, options)
    stores = stores_in(data, model)
    from mamba_fsdp.verbs.loading import inference_world, load

    world = inference_world()
    stream = sys.stderr if options.json else sys.stdout
    console = Console(enabled=world.rank == 0, stream=stream)
    loaded = load(
        model, model_name=options.model_name, reset_at_documents=options.reset_at_documents
    )
    console.line(f"model          {model}")
    numbers = {}  # by the name of the store
    for name, store in stores.items():
        evaluation = measure(loaded, store, options, console)
        numbers[name] = asdict(evaluation)
        console.line(f"data           {name}")
        console.line("\n".join(evaluation.lines()))
    if options.json and world.rank == 0:
        print(as_json({"model": model, "data": numbers}))
    world.close()


def evaluate(model: "Loaded", data: str | Path, options: EvaluationConfig) -> Evaluation:
    """Returns the Evaluation of a model over the token store at the path `data`: its loss,
    perplexities and bits per byte. Raises UserError as `measure` does."""
    return measure(model, data, options, Console(enabled=False))


def measure(
    model: "Loaded", data: str | Path, options: EvaluationConfig, console: Console
) -> Evaluation:
    """Returns the Evaluation of a model over a store, and shows the progress on the console. All ranks call it.

    Raises UserError if there is no store, or if the model and the store have different tokenizers.
    """
    from mamba_fsdp.data.loader import BatchShape, evaluation_batches, evaluation_windows
    from mamba_fsdp.trainer.validation import evaluate as evaluate_loss
    from mamba_fsdp.verbs.loading import inference_world

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

    loss, tokens = evaluate_loss(model.network, batches, world, show)
    counts = count_words_and_bytes(store, spans[world.rank :: world.size])
    words, size = world.all_reduce_sum(list(counts))
    nats = loss * tokens
    return Evaluation(
        tokens=tokens,
        all_tokens=store.token_count - 1,
        loss=loss,
        perplexity=_exp(loss),
        words=int(words),
        word_perplexity=_exp(nats / words) if words else None,
        bytes=int(size),
        bits_per_byte=bits_per_byte(loss, tokens, size),
        seconds=time.perf_counter() - began,
        window=window,
        stride=stride,
    )


def _exp(number: float) -> float:
    return math.exp(min(number, 700.0))  # exp of more overflows


def stores_in(data: str, model: str) -> dict[str, Path]:
    """Returns {name: path} of the token stores at `data`. Raises UserError if there are none; the message has the
    command that makes a store from text."""
    stores = {}
    for split in ("", *SPLITS["validation"], *SPLITS["test"]):
        path = Path(data, split)
        if is_store(path):
            stores[f"{data} {split}".strip()] = path
    if not Path(data).exists():
        raise UserError(f"{data}: there is no such file or folder{near_path(Path(data))}")
    if not stores:
        tokenizer = Path(model, TOKENIZER)
        if not tokenizer.is_dir():
            tokenizer = Path("PATH")
        raise UserError(
            f"{data} is not a token store. Make one from text: .venv/bin/python get_dataset.py {shlex.quote(data)} OUT "
            f"--tokenizer={tokenizer} --validation_fraction=0; then evaluate OUT/train"
        )
    return stores
