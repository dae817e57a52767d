"""python -m mamba_fsdp inspect PATH [--verify]

Describe PATH: a run folder, a checkpoint, a model (consolidated.00.pth,
transformers, state-spaces, other trainers' files; a model file without
config.json by its tensors), a token store, or input for get_dataset.py.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from mamba_fsdp.data.corpus import find_files, kind_of
from mamba_fsdp.data.store import SPLITS, TokenStore, is_store, near_path, split_in
from mamba_fsdp.data.tokenizer import load_words
from mamba_fsdp.errors import UserError, counted, import_command
from mamba_fsdp.fields import setting
from mamba_fsdp.model.config import ModelConfig, checked_model
from mamba_fsdp.model.presets import title
from mamba_fsdp.report.console import read_share, say
from mamba_fsdp.run.layout import committed
from mamba_fsdp.run.names import CHECKPOINTS, COMMIT, METRICS, MODEL_CONFIG, STATUS, TASK_RESULTS
from mamba_fsdp.run.records import read, read_status
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.verbs import checkpoints

WEIGHTS = {".safetensors", ".pth", ".pt", ".bin", ".distcp"}
SAMPLES = 3
SAMPLE_TOKENS = 64
SAMPLE_WIDTH = 160  # characters of a sample to show


@dataclass
class Options:
    verify: bool = setting(False)
    """Read every byte of a token store, checkpoint or run and compare it with the checksums. The exit code is 1 or 2 if
    anything is damaged. Models have no checksums and are refused."""


def main(path: str, options: Options) -> int:
    verify = options.verify
    place = Path(path)
    if not place.exists():
        raise UserError(f"{path}: there is no such file or folder{near_path(place)}")
    if (place / CHECKPOINTS).is_dir() or (place / STATUS).is_file():
        return show_run(place, verify)
    if (place / COMMIT).is_file():
        return show_checkpoint(place, verify)
    if is_store(split_in(place)) and not (place / MODEL_CONFIG).is_file():
        for store in dict.fromkeys(split_in(place, split) for split in SPLITS):
            if is_store(store):
                show_data(store, verify)
    elif verify:
        raise UserError(
            f"{path}: --verify is for token stores, checkpoints and runs; this holds no checksums"
        )
    elif is_input(place):
        show_input(place)
    else:
        show_model(place)
    return 0


def show_run(path: Path, verify: bool) -> int:
    say("run", path)
    status = read_status(path)
    words = [str(status[key]) for key in ("status", "reason") if status.get(key)]
    say("status", ": ".join(words) or f"unknown: no {STATUS}")
    entries = read(path / METRICS)
    for metric, name in (("loss", "training"), ("val_loss", "validation")):
        values = [entry for entry in entries if isinstance(entry.get(metric), float)]
        if values:
            last = values[-1]
            text = f"loss {last[metric]:.4f} at step {last['step']}"
            if metric == "val_loss" and last.get("val_share"):
                text += f" ({read_share(last['val_share'])})"
            say(name, text)
    for newest in sorted(path.glob(TASK_RESULTS.format("*")))[-1:]:
        say("tasks", newest)
    if verify or committed(path / CHECKPOINTS):
        return checkpoints.main(str(path), checkpoints.Options(verify))
    return 0


def show_checkpoint(path: Path, verify: bool) -> int:
    from mamba_fsdp.checkpoint.saved_run import read_run

    say("checkpoint", path)
    code = checkpoints.main(str(path), checkpoints.Options(verify))
    if code:
        return code
    run = read_run(path)
    progress = run.progress
    say("tokens", f"{progress.tokens:,}, {counted(progress.skipped_steps, 'step')} skipped")
    say("written by", f"{counted(run.world_size, 'rank')}, torch {run.torch}")
    say("data", json.dumps(progress.data.get("drawn")))
    say("model", describe_model(checked_model(path, run.model)))
    return 0


def is_input(place: Path) -> bool:
    """Returns whether `place` holds text or tokens for get_dataset.py, and no weights."""
    paths = [place, *place.rglob("*")]
    return any(map(kind_of, paths)) and not any(path.suffix in WEIGHTS for path in paths)


def show_input(path: Path) -> None:
    files = find_files(str(path), DatasetConfig())
    say("data", f"{counted(len(files), 'file')}, which {import_command(path)} imports")


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
    """Prints the tensors of a file without a config.json next to it."""
    from mamba_fsdp.interop.weights import open_file

    shapes = open_file(path).shapes
    numbers = sum(math.prod(shape) for shape in shapes.values())
    say("tensors", f"{path}: {len(shapes)}, {numbers:,} numbers")
    say(
        "to use it",
        f"there is no {MODEL_CONFIG} next to it, so name its preset, as in --model_name=mamba-130m",
    )
    for name, shape in shapes.items():
        say("", f"{name:<64} {shape}")


def describe_model(model: ModelConfig) -> str:
    return (
        f"{title(model)}, {counted(model.n_layer, 'layer')} {model.layers}, d_model {model.d_model}, "
        f"vocabulary {model.vocab_size:,}"
    )


def show_data(path: Path, verify: bool) -> None:
    """Prints the contents of the token store at `path`. Raises UserError for a damaged store."""
    store = TokenStore(path)
    say("token store", path)
    if verify:
        store.verify()
        say("verified", "all bytes read, every file has its size and checksum")
    say("tokens", f"{store.token_count:,} in {counted(store.document_count, 'document')}")
    say("vocabulary", f"{store.vocab_size:,}, eos {store.eos}, {store.dtype.name}")
    _show_samples(store)


def _show_samples(store: TokenStore) -> None:
    """Prints the store's tokenizer and, with it, samples of the store's text."""
    try:
        folder = store.tokenizer_path
    except UserError:
        say("tokenizer", "none")
        return
    say("tokenizer", folder)
    words = load_words(folder)
    for number in range(SAMPLES):
        start = store.token_count * number // SAMPLES
        tokens = store.read(start, min(SAMPLE_TOKENS, store.token_count - start)).tokens
        if tokens.max() < words.vocab_size:
            say(f"at {start:,}", repr(words.decode(tokens.tolist()))[:SAMPLE_WIDTH])
