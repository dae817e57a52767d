"""python -m mamba_fsdp inspect PATH [--verify] [--tokenizer=FOLDER] [--eos_token=ID]

Say what PATH holds: a run folder, a checkpoint or a rank's file of one, a model (consolidated.00.pth, transformers,
state-spaces, other trainers' files; of one without config.json, its tensors), or data: a token store, or tokens in
another format (docs/data.md).

  --verify    read every byte: of a token store, compared with the checksums; of a checkpoint or a run, as
              python -m mamba_fsdp checkpoints does; of other data, which has none, to speak of all of it and not of
              samples. Exits with 1 or 2 where anything is damaged. Refuses models, which hold no checksums

How to read data in other formats, as in training: --tokenizer (also shows samples), --eos_token, --bos_token,
--strip_tokens, --col_name, --pack, --index_dir
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from config.model_config import ModelConfig, checked_model
from config.presets import title
from config.train_config import USUAL_READING, DataConfig, ReadingConfig
from mamba_fsdp.checkpoint.retention import size_of
from mamba_fsdp.data.foreign.indexed import IndexedSource
from mamba_fsdp.data.opening import is_source, open_source, refuse_text, split_in
from mamba_fsdp.data.source import Source
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.data.tokenizer import load_words
from mamba_fsdp.errors import UserError
from mamba_fsdp.report.console import Console, read_share, say, scaled
from mamba_fsdp.report.records import numbers_of, read
from mamba_fsdp.run_layout import (
    CHECKPOINTS,
    COMMIT,
    CONSOLIDATED,
    METRICS,
    MODEL_CONFIG,
    MODELS,
    STATUS,
    committed,
)
from mamba_fsdp.verbs import checkpoints

WINDOW, WINDOWS = (
    1 << 16,
    64,
)  # tokens of data read at a time; how many times unless all is asked for
SAMPLES, SAMPLE_TOKENS, SAMPLE_WIDTH = 3, 64, 160


def main(path: str, verify: bool = False, reading: ReadingConfig = USUAL_READING) -> int:
    place = Path(path)
    if (place.parent / COMMIT).is_file() and place.is_file():
        say("part", f"{place.name}, {scaled(size_of(place), 'B')}, of the checkpoint that follows")
        place = place.parent
    if (place / CHECKPOINTS).is_dir() or (place / STATUS).is_file():
        show_run(place)
    elif (place / COMMIT).is_file():
        show_checkpoint(place)
    elif is_data(place):
        held_out = split_in(place, "validation")
        for part in [split_in(place), *[held_out] * (held_out != place)]:
            show_data(part, reading, verify)
    elif verify:
        raise UserError(
            f"{path}: --verify is for token stores, checkpoints and runs; this holds no checksums"
        )
    else:
        show_model(place)
    if verify and ((place / CHECKPOINTS).is_dir() or (place / COMMIT).is_file()):
        return checkpoints.main(str(place), verify=True)
    return 0


def show_run(path: Path) -> None:
    from mamba_fsdp.train.run_folder import RunFolder

    status, entries = (
        RunFolder(path).status(),
        [{"step": entry["step"], **numbers_of(entry)} for entry in read(path / METRICS)],
    )
    say("run", path)
    told = " ".join(str(status[key]) for key in ("status", "reason", "time") if status.get(key))
    say("status", told or f"unknown: no {STATUS}")
    for kind, name in (("loss", "training"), ("val_loss", "validation")):
        if values := [entry for entry in entries if entry.get(kind) is not None]:
            last, ends = values[-1], values[:1] + values[1:][-1:]
            part = (
                f" ({read_share(last['val_share'])})"
                if kind in last and last.get("val_share")
                else ""
            )
            say(
                name,
                "loss "
                + ", ".join(f"{end[kind]:.4f} at step {end['step']}" for end in ends)
                + part,
            )
    for checkpoint in committed(path / CHECKPOINTS):
        say("checkpoint", f"{checkpoint} ({scaled(size_of(checkpoint), 'B')})")
    for model in sorted(path.glob(f"{MODELS}/*/{CONSOLIDATED}")):
        say("model", f"{model} ({scaled(size_of(model), 'B')})")


def show_checkpoint(path: Path) -> None:
    from mamba_fsdp.checkpoint.folder import Reader

    reader = Reader(path)
    state, progress = reader.state, reader.state["progress"]
    say("checkpoint", path)
    say(
        "step",
        f"{progress['step']:,}, {progress['tokens']:,} tokens, {progress['skipped_steps']} steps skipped",
    )
    say("written by", f"{state['world_size']} ranks, torch {state['torch']}")
    say("data", json.dumps(progress["data"].get("drawn")))
    say("model", describe_model(checked_model(path, state["settings"]["model"])))
    say(
        "size",
        f"{scaled(size_of(path), 'B')} in {len(reader.files)} files, {len(reader.tensors)} tensors",
    )


def is_data(place: Path) -> bool:
    """Whether PATH is data and no model. Raises UserError where there is nothing."""
    if (place / MODEL_CONFIG).is_file():
        return False
    if is_source(split_in(place)):
        return True
    if not place.exists():
        raise UserError(f"{place}: there is no such file or folder")
    refuse_text(place)
    return False


def show_model(path: Path) -> None:
    from mamba_fsdp.interop.weights import read_weights
    from mamba_fsdp.model.spec import parameter_count

    if path.is_file() and not (path.parent / MODEL_CONFIG).is_file():
        show_tensors(path)
        return
    weights = read_weights(path)
    say("model", path)
    say("structure", describe_model(weights.config))
    say("parameters", f"{parameter_count(weights.config):,}")
    say("tokenizer", weights.tokenizer_path or "none")


def show_tensors(path: Path) -> None:
    """What a file without config.json beside it holds."""
    from mamba_fsdp.interop.prior import guess
    from mamba_fsdp.interop.weights import open_file
    from mamba_fsdp.parallel.world import World

    found = open_file(path, World.alone())
    config = guess(found)
    say(
        "tensors",
        f"{path}: {len(found.shapes)}, {sum(map(math.prod, found.shapes.values())):,} numbers",
    )
    say(
        "structure",
        f"{describe_model(config)}, as its tensors tell" if config else "that of no preset",
    )
    say(
        "to use it",
        f"there is no {MODEL_CONFIG} beside it, so name its preset: --model_name="
        f"{config.model_name if config else 'PRESET'}",
    )
    for name, shape in found.shapes.items():
        print(f"  {name:<64} {shape}")


def describe_model(model: ModelConfig) -> str:
    return (
        f"{title(model)}, {model.n_layer} layers {model.layers}, d_model {model.d_model}, "
        f"vocabulary {model.vocab_size:,}"
    )


class Survey(NamedTuple):
    read: int  # tokens
    lowest: int
    highest: int
    documents: int  # that begin in what was read
    longest: int  # tokens of a document, as far as it was read
    counted: int  # tokens that count in the loss


def show_data(path: Path, reading: ReadingConfig, verify: bool) -> None:
    """Prints what the source at `path` holds. Raises UserError where something is wrong with it."""
    source = open_source(
        path,
        DataConfig(**vars(reading)),
        lambda line: say("note", " ".join(line.split())),
        inspecting=True,
    )
    say(source.format, path)
    if isinstance(source, TokenStore) and verify:
        source.verify()
        say("verified", "all bytes read, every file has its size and checksum")
    known = f" in {source.document_count:,} documents" if source.document_count else ""
    say("tokens", f"{source.token_count:,}{known}")
    if isinstance(source, IndexedSource):
        _show_files(source)
    found = survey(source, every=verify)
    part = (
        "all of it"
        if found.read == source.token_count
        else f"of {found.read:,} tokens spread over it"
    )
    say("ids", f"{found.lowest:,} to {found.highest:,} ({part})")
    if found.counted < found.read:
        say("loss mask", f"{found.counted / found.read:.1%} of the tokens count ({part})")
    say(
        "documents",
        f"the longest {'' if found.read == source.token_count else 'at least '}{found.longest:,} tokens; "
        f"{found.documents:,} begin in {'it' if found.read == source.token_count else 'what was read'}",
    )
    size, wrong = _show_tokenizer(source, found)
    if isinstance(source, TokenStore):
        say("vocabulary", f"{source.vocab_size:,}, eos {source.eos}, {source.dtype.name}")
    if source.eos < 0 and not (
        isinstance(source, IndexedSource) and source.plan.layout
    ):  # which has positions
        wrong.append(
            "which token ends documents is not known: --eos_token=ID or --tokenizer=FOLDER says it"
        )
    if 0 < (size or source.vocab_size) <= found.highest:
        wrong.append(
            f"token id {found.highest:,} is not below the vocabulary's {size or source.vocab_size:,}"
        )
    for sentence in wrong:
        say("beware", sentence)


def survey(source: Source, *, every: bool) -> Survey:
    """What `source` holds: read whole if it is `every` or small, else in WINDOWS windows. In constant memory."""
    display, count = Console(), -(-source.token_count // WINDOW)
    every = every or count <= WINDOWS
    read = documents = longest = counted = begun = 0
    lowest, highest = np.iinfo(np.int64).max, 0
    for number in range(count if every else WINDOWS):
        start = WINDOW * (number if every else number * count // WINDOWS)
        tokens, positions, mask = source.read(start, min(WINDOW, source.token_count - start))
        starts: np.ndarray = start + np.flatnonzero(positions == 0)
        begun = (
            begun if every else start
        )  # where the document that is open began, as far as it was read
        longest = max(longest, int(np.diff([begun, *starts, start + len(tokens)]).max()))
        begun = int(starts[-1]) if len(starts) else begun
        read, documents = read + len(tokens), documents + len(starts)
        lowest, highest = min(lowest, int(tokens.min())), max(highest, int(tokens.max()))
        counted += len(tokens) if mask is None else int(mask.sum())
        display.passing(f"{read:,} tokens read")
    display.close()
    return Survey(read, lowest, highest, documents, longest, counted)


def _show_files(source):
    plan, files = source.plan, source.files
    names = ("documents", "tokens", "pieces")
    documents, tokens, pieces = (sum(getattr(file, name) for file in files) for name in names)
    say(
        "files",
        f"{len(files):,} of {scaled(sum(file.size for file in files), 'B')}, "
        f"{', '.join(sorted({np.dtype(file.dtype).name for file in files}))}",
    )
    if plan.documents:
        added = plan.added * pieces
        say(
            "in the files",
            f"{tokens:,} tokens in {documents:,} documents; left out: {documents - pieces:,} empty "
            f"ones, {tokens + added - source.token_count:,} separators at ends; added: {added:,}",
        )


def _show_tokenizer(source, found):
    """(its size, 0 where it is not known; a list of what is wrong with it), after some samples."""
    try:
        folder = source.tokenizer_path
    except UserError:
        say("tokenizer", "none; --tokenizer=FOLDER shows samples")
        return 0, []
    say("tokenizer", folder)
    words = load_words(folder)
    for number in range(SAMPLES):
        start = source.token_count * number // SAMPLES
        tokens = source.read(start, min(SAMPLE_TOKENS, source.token_count - start)).tokens
        if tokens.max() < words.vocab_size:
            say(f"at {start:,}", repr(words.decode(tokens.tolist()))[:SAMPLE_WIDTH])
    other = source.eos >= 0 and words.eos is not None and words.eos != source.eos
    return words.vocab_size, [f"its tokenizer's eos is {words.eos}, not {source.eos}"] * other
