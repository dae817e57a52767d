"""python -m mamba_fsdp evaluate MODEL DATA [--seq_length=2048] [--stride=0] [--batch_size=8] [--limit=0]
                                         [--compare_baseline=MODEL] [--generate_samples=0] [--json]
       python -m mamba_fsdp evaluate MODEL --tasks=NAME,NAME [--include_path=FOLDER] [--num_fewshot=N]

Token loss, perplexity per token and per word, and bits per byte of a model, every token predicted once from those
before it in its window (docs/evaluating.md). MODEL is a run folder, a checkpoint, a consolidated.00.pth, or a
transformers or state-spaces folder. DATA is a token store or tokens in another format (docs/data.md), a folder of
stores, or text as get_dataset.py reads it: files, or a name of `datasets`. Under torchrun the ranks share the work.

  --seq_length          tokens per window, as many as you like; more context, lower loss
  --stride              from one window to the next; 0: seq_length, no overlap. Smaller: each token has at least
                        seq_length - stride others before it, and the work is seq_length / stride times as much
  --batch_size          windows per forward pass, fewer where they are long
  --limit               windows in all, spread evenly over the data; 0 for all. Of tasks: documents of each
  --compare_baseline    another model over the same data; with another tokenizer, over text, per word and byte
  --generate_samples    continue so many places of the data
  --json                the numbers as JSON on stdout, what is told otherwise on stderr
  --tasks               run these of lm-evaluation-harness on the model, which need not be exported
  --include_path        folder of tasks of your own (yaml)
  --num_fewshot         examples before each question; without it as the task says
  --split --config --text_column --documents   of text, as get_dataset.py takes them; by default, of names of `datasets`
                        validation,test
  --reset_at_documents  let nothing cross the start of a document
  --tokenizer           of data that comes without one; by default the model's. How else to read data in other formats,
                        as in training: --eos_token, --bos_token, --strip_tokens, --col_name, --pack, --index_dir
  --allow_other_tokenizer  where you know that the model fits the tokens of another tokenizer than its own
  --model_name          the preset that MODEL is, where there is no config.json beside it
"""

import contextlib
import glob
import io
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np

from config.dataset_config import DatasetConfig
from config.fields import Bounds, setting
from config.train_config import USUAL_READING, DataConfig, ReadingConfig
from mamba_fsdp.data.opening import format_of, is_source, open_source
from mamba_fsdp.data.source import Source
from mamba_fsdp.data.text import open_source as open_text
from mamba_fsdp.data.tokenize import make_dataset
from mamba_fsdp.data.tokenizer import check_tokenizer, is_other, load_words
from mamba_fsdp.errors import UserError
from mamba_fsdp.report.console import Console

if TYPE_CHECKING:
    from mamba_fsdp.parallel.world import World
    from mamba_fsdp.verbs.loading import Loaded

DECODED = 1 << 16  # tokens at a time
PROMPT, SAMPLE = 32, 100  # tokens of the data that a sample continues, and of a sample
ROWS = {
    "loss": "loss, nats per token",
    "perplexity": "perplexity per token",
    "word_perplexity": "perplexity per word",
    "bits_per_byte": "bits per byte",
}


@dataclass
class EvaluationConfig:
    """The options beside the windows', as the help page above tells them."""

    compare_baseline: str = setting("")
    generate_samples: int = setting(0, at_least=0)
    json: bool = setting(False)
    tasks: list[str] = setting([])
    include_path: str = setting("")
    num_fewshot: int = setting(-1, at_least=-1)
    split: str = setting("")
    config: str = setting("")
    text_column: str = setting("text")
    documents: str = setting("file")
    reset_at_documents: bool = setting(False)
    allow_other_tokenizer: bool = setting(False)
    model_name: str = setting("")


USUAL = EvaluationConfig()


class Evaluation(NamedTuple):
    tokens: int  # that were predicted
    of: int  # those of the store that can be
    loss: float  # nats per token
    words: int  # what stands between white space in the text of the predicted tokens; 0: no tokenizer is known
    bytes: int  # of that text
    seconds: float
    window: int  # tokens of one
    stride: int  # from one to the next

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def word_perplexity(self) -> float | None:
        """exp(nats of all predicted tokens, ends of documents among them, over words): comparable between tokenizers.
        None where the words are not known."""
        return math.exp(min(self.loss * self.tokens / self.words, 700.0)) if self.words else None

    @property
    def bits_per_byte(self) -> float | None:
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None


def main(
    model: str,
    data: str = "",
    seq_length: Annotated[int, Bounds(at_least=1)] = 2048,
    stride: Annotated[int, Bounds(at_least=0)] = 0,
    batch_size: Annotated[int, Bounds(at_least=1)] = 8,
    limit: Annotated[int, Bounds(at_least=0)] = 0,
    options: EvaluationConfig = USUAL,
    reading: ReadingConfig = USUAL_READING,
) -> None:
    from mamba_fsdp.verbs.loading import inference_world, load

    if not (data or options.tasks):
        raise UserError("name DATA behind MODEL, or --tasks of lm-evaluation-harness; see --help")
    world = inference_world()
    display = Console(enabled=world.rank == 0, stream=sys.stderr if options.json else sys.stdout)
    windows = {"seq_length": seq_length, "stride": stride, "batch_size": batch_size, "limit": limit}
    models = {"model": model} | (
        {"baseline": options.compare_baseline} if options.compare_baseline else {}
    )
    found: dict[str, dict[str, Evaluation]] = {}
    tasks, samples, identities = {}, [], []
    for role, name in models.items():
        loaded = load(
            name, model_name=options.model_name, reset_at_documents=options.reset_at_documents
        )
        identities.append([*filter(None, loaded.weights.tokenizer_identities())])
        with opened(loaded, data, options, reading) as places:
            for label, place in places.items():
                found.setdefault(label, {})[role] = evaluate(
                    loaded,
                    place,
                    allow_other_tokenizer=options.allow_other_tokenizer,
                    show=display.passing,
                    **windows,
                    **vars(reading),
                )
                if options.generate_samples and role == "model":
                    samples += (
                        world.on_rank0(  # called at once
                            lambda: sampled(loaded, place, options.generate_samples)  # noqa: B023
                        )
                        or []
                    )
        if options.tasks:
            from mamba_fsdp.verbs import harness

            tasks[role] = harness.run(loaded, options, world, windows)
    same = not is_other(identities[0][0] if identities[0] else "", identities[-1])
    for label, evaluations in found.items():
        display.line(
            "\n".join(
                [*[f"data           {label}"] * (len(found) > 1), *said(evaluations, models, same)]
            )
        )
    for prompt, text in samples:
        display.line(f"--- sample ---\n{prompt}|{text}")
    for role, results in tasks.items():
        display.line("\n".join([f"tasks of       {models[role]}", *harness.table(results)]))
    if options.json and world.rank == 0:
        numbers = {
            label: {
                role: each._asdict() | {name: getattr(each, name) for name in ROWS}
                for role, each in told.items()
            }
            for label, told in found.items()
        }
        plain = json.dumps({**models, "data": numbers, "samples": samples, "tasks": tasks})
        print(
            json.dumps(json.loads(plain, parse_constant=lambda _: None), indent=1)
        )  # JSON has no NaN
    world.close()


def said(
    evaluations: Mapping[str, Evaluation], models: Mapping[str, str], same_tokens: bool
) -> Iterator[str]:
    """The lines that tell of one model, or of two beside each other. same_tokens: both have one tokenizer."""
    found = evaluations["model"]
    if len(evaluations) == 1:
        yield f"tokens         {found.tokens:,} of {found.of:,}"
    yield f"windows        {found.window:,} tokens long, one every {found.stride:,}"
    if len(evaluations) > 1:
        yield from (f"{role:<14} {name}" for role, name in models.items())
        yield f"{'':<22}{'model':>16}{'baseline':>16}{'difference':>16}"
        for name, title in ROWS.items():
            values = [getattr(each, name) for each in evaluations.values()]
            if None not in values and (same_tokens or name in ("word_perplexity", "bits_per_byte")):
                values.append(values[0] - values[1])
                yield f"{title:<22}" + "".join(
                    f"{each:>16{'.4e' if abs(each) > 1e6 else ',.4f'}}" for each in values
                )
        if not same_tokens:
            yield "Their tokenizers differ: losses per token are of different tokens."
        return
    yield f"loss           {found.loss:.4f} nats per token"
    yield f"perplexity     {found.perplexity:,.3f} per token" + (
        f", {found.word_perplexity:,.3f} per word ({found.words:,} words between white space)"
        if found.words
        else ""
    )
    if found.bytes:
        yield f"bits per byte  {found.bits_per_byte:.4f} ({found.bytes:,} bytes)"
    yield f"speed          {found.tokens / found.seconds:,.0f} tokens/s"


@contextlib.contextmanager
def opened(
    model: "Loaded", data: str, options: EvaluationConfig, reading: ReadingConfig
) -> Iterator[dict[str, str]]:
    """{what it is called: its path} of the stores that `data` means. Text is tokenised by the model's tokenizer, or the
    one that is named, as get_dataset.py does, into a folder that goes afterwards. Called by all ranks."""
    from mamba_fsdp.verbs.loading import inference_world

    stores = {
        f"{data} {name}": str(Path(data, name))
        for name in ("validation", "test")
        if data and is_source(Path(data, name))
    }
    if not data or not options.split and (stores or is_source(Path(data))):
        yield stores or {data: data} if data else {}
        return
    world, made = inference_world(), {}
    splits = options.split or (
        "" if Path(data).expanduser().exists() or glob.has_magic(data) else "validation,test"
    )
    # Ranks on other machines see no folder of this one but a shared one.
    with tempfile.TemporaryDirectory(dir="." if world.size > world.local_size else None) as own:
        folder = world.broadcast_object(own)
        for split in splits.split(","):
            how = DatasetConfig(
                tokenizer=reading.tokenizer or str(model.tokenizer_path),
                validation_fraction=0,
                eos_token=reading.eos_token,
                pack="none" if reading.pack == "none" else "document",
                split=split,
                config=options.config,
                text_column=options.text_column,
                documents=options.documents,
            )
            how.check()

            def make(how=how, place=f"{folder}/{split or 'text'}"):
                with contextlib.redirect_stdout(io.StringIO()):
                    make_dataset(open_text(data, how), place)
                return f"{place}/train"

            made[f"{data} {split}".strip()] = world.on_rank0(make)
        yield made
        world.barrier()


def evaluate(
    model: "Loaded",
    data: str,
    *,
    seq_length: int = 2048,
    stride: int = 0,
    batch_size: int = 8,
    limit: int = 0,
    allow_other_tokenizer: bool = False,
    show: Callable[[str], None] = lambda text: None,
    **reading: Any,
) -> Evaluation:
    """The model over the tokens at this path; the options are those of the command above, and show is told how far it
    is. reading: settings of DataConfig that say how to read them. Called by all ranks. Raises UserError."""
    from mamba_fsdp.data.loader import BatchLayout, evaluation_batches, evaluation_windows
    from mamba_fsdp.train import loop
    from mamba_fsdp.verbs.loading import inference_world

    network, weights = model
    if stride > seq_length:
        raise UserError(
            f"--stride={stride} is longer than a window, --seq_length={seq_length}: what lies between two "
            "would be left out"
        )
    settings = DataConfig(
        reset_at_documents=network.reset_at_documents,
        allow_other_tokenizer=allow_other_tokenizer,
        **reading,
    )
    if not settings.tokenizer and format_of(Path(data)) and weights.tokenizer_path:
        settings.tokenizer = str(weights.tokenizer_path)
    tokens, world, began, read = (
        open_source(data, settings),
        inference_world(),
        time.perf_counter(),
        0,
    )
    if not allow_other_tokenizer:
        check_tokenizer(data, tokens.tokenizer, weights.source, weights.tokenizer_identities())
    if tokens.vocab_size > weights.config.vocab_size:
        raise UserError(
            f"{data} has a vocabulary of {tokens.vocab_size}, the model one of "
            f"{weights.config.vocab_size}: they don't belong together"
        )
    settings.seq_length = length = max(1, min(seq_length, tokens.token_count - 1))
    stride = min(stride or length, length)
    split = BatchLayout(world.rank, world.size, max(1, min(batch_size, network.part // length)))
    windows = evaluation_windows(tokens.token_count, length, stride, limit or None)

    def shown(batches):
        nonlocal read
        for batch in batches:
            show(f"{min(read * world.size, len(windows)):,} of {len(windows):,} windows read")
            read += len(batch.tokens)
            yield batch

    batches = evaluation_batches(
        tokens,
        data,
        settings,
        split,
        vocab_size=weights.config.vocab_size,
        limit=limit or None,
        stride=stride,
    )
    loss, count = loop.evaluate(network, shown(batches), world)
    ends = np.minimum(windows * stride + length + 1, tokens.token_count)
    starts = np.where(windows, windows * stride + length - stride, 0) + 1
    apart = np.flatnonzero(starts[1:] != ends[:-1])
    spans = zip(starts[np.append(0, apart + 1)].tolist(), ends[np.append(apart, -1)].tolist())
    words, size = words_and_bytes(tokens, spans, world)
    return Evaluation(
        count,
        tokens.token_count - 1,
        loss,
        words,
        size,
        time.perf_counter() - began,
        length,
        stride,
    )


def words_and_bytes(
    source: Source, spans: Iterable[tuple[int, int]], world: "World"
) -> tuple[int, int]:
    """Of the text of the source's tokens in the spans, each (start, end), counted by all ranks together: as many for
    any number of them. Words are what stands between white space, as in the word-level perplexity of WikiText; ends of
    documents and other special tokens are none. (0, 0) where no tokenizer is known."""
    try:
        backend = load_words(source.tokenizer_path).backend
    except UserError:  # the source came without
        return 0, 0

    def cut(at, end):  # moved behind the end of a document, if there is one near: it cuts no word
        tokens = source.read(at, min(DECODED, end - at)).tokens
        ends: np.ndarray = np.flatnonzero(tokens == source.eos)
        return at + int(ends[0]) + 1 if len(ends) else at

    counted = [0, 0]
    pieces = [(at, start, end) for start, end in spans for at in range(start, end, DECODED)]
    for at, start, end in pieces[world.rank :: world.size]:
        low = at if at == start else cut(at, end)
        high = end if at + DECODED >= end else cut(at + DECODED, end)
        if low < high:
            tokens, _, mask = source.read(low, high - low)
            tokens = tokens if mask is None else tokens[mask]
            parts = [
                part.tolist() for part in np.split(tokens, np.flatnonzero(tokens == source.eos) + 1)
            ]
            for text in backend.decode_batch(parts, skip_special_tokens=True):
                counted[0] += len(text.split())
                counted[1] += len(text.encode())
    words, size = world.all_reduce_sum([float(number) for number in counted])
    return int(words), int(size)


def sampled(model: "Loaded", data: str, count: int) -> list[tuple[str, str]]:
    """(text of the tokens at this path, how the model continues it) at `count` places spread evenly over them."""
    from mamba_fsdp.verbs.generate import continuations

    source = open_source(data)
    places = np.arange(count) * max(0, source.token_count - PROMPT) // count
    words = load_words(model.tokenizer_path)
    prompts = [
        words.decode(source.read(place, min(PROMPT, source.token_count)).tokens.tolist()).strip(
            "\ufffd"
        )
        for place in places.tolist()
    ]
    texts = [""] * count
    for piece in continuations(model, prompts, length=SAMPLE):
        texts[piece.prompt] += piece.text
    return list(zip(prompts, texts))
