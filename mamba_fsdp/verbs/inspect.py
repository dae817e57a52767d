"""python -m mamba_fsdp inspect PATH [--verify]

Describe PATH: a run folder, a checkpoint, a model (consolidated.00.pth,
transformers, state-spaces, or a file of another trainer), a token store, or
input for get_dataset.py. For a model file without config.json, the tensors are
listed.
"""

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.data.tokenizer import load_for_prompts
from mamba_fsdp.errors import UserError, command
from mamba_fsdp.fields import setting
from mamba_fsdp.importing.inputs import find_files
from mamba_fsdp.importing.kinds import (
    SPLITS,
    LeftOut,
    PathInfo,
    classify_path,
    import_command,
    is_store,
    split_in,
    unexpected_path_error,
)
from mamba_fsdp.model.config import ModelConfig, parse_model_config
from mamba_fsdp.model.presets import model_title
from mamba_fsdp.reporting.console import describe_share, print_field
from mamba_fsdp.run.layout import newest_step
from mamba_fsdp.run.names import EVALUATIONS, METRICS, MODEL_CONFIG, SETTINGS, STATUS, TASK_RESULTS
from mamba_fsdp.run.node_record import read_records
from mamba_fsdp.run.records import (
    best_validation,
    read_entries,
    read_events,
    read_starts,
    read_status,
)
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.settings.resolve import read_run
from mamba_fsdp.storage.retry import is_file
from mamba_fsdp.text import format_count
from mamba_fsdp.verbs import checkpoints

INSPECTABLE = "a run, a checkpoint, a model, a token store, or what get_dataset.py imports"
MAX_LOSSES = 10  # the number of lines of nodes.jsonl to print
SAMPLES = 3
SAMPLE_TOKENS = 64
SAMPLE_WIDTH = 160  # the number of characters of a sample to print


@dataclass
class Options:
    verify: bool = setting(False)
    """Read every byte of a token store, checkpoint or run and compare it with the checksums. The exit code is 1 or 2 if
    anything is damaged. It is an error for models, because they have no checksums."""


def inspect(path: str | Path, options: Options) -> None:
    """Prints a description of a run, a checkpoint, a model, a token store, or text to import.

    path: the file or folder to describe. Raises UserError if `path` is none of these, or if it is damaged."""
    if main(path, options):
        raise UserError(f"{path} is damaged; the lines above describe the damage")


def main(path: str | Path, options: Options) -> int:
    verify = options.verify
    place = classify_path(path)
    if place.kind == "part":
        (folder,) = place.names
        print_field("file of", folder)
        place = classify_path(folder)
    if place.kind in CHECKSUMMED_KINDS:
        return CHECKSUMMED_KINDS[place.kind](place, verify)
    if place.kind in ("nothing", "pruned", "empty", "other"):
        raise unexpected_path_error(path, INSPECTABLE)
    if verify:
        raise UserError(
            f"{path} has no checksums; --verify accepts only token stores, checkpoints and runs"
        )
    if place.kind in ("model", "model_file", "dcp"):
        show_model(place.path)
    elif place.is_input:
        show_input(place)
    else:
        print_field("path", f"{place.path}: {place.title}")
        print_field("to use it", place.use)
    return 0


def show_runs(place: PathInfo, verify: bool) -> int:
    """Prints a line for each run in a folder, or the full description of each run if `verify` is set. Returns the exit
    code."""
    code = 0
    for name in place.names:
        run = place.path / name
        if verify:
            code = max(code, show_run(classify_path(run), verify))
        else:
            print_field("run", f"{run}  {_format_status(run)}")
    return code


def show_run(place: PathInfo, verify: bool) -> int:
    path = place.path
    print_field("run", path)
    print_field("status", _format_status(path))
    _show_settings(path)
    entries = read_entries(path / METRICS)
    for metric, name in (("loss", "training"), ("val_loss", "validation")):
        values = [entry for entry in entries if isinstance(entry.get(metric), float)]
        if values:
            last = values[-1]
            text = f"loss {last[metric]:.4f} at step {last['step']}"
            if metric == "val_loss" and last.get("val_share"):
                text += f" ({describe_share(last['val_share'])})"
            best = best_validation(values)
            if best and best is not last:
                text += f"; the best {best['val_loss']:.4f} at step {best['step']}"
            print_field(name, text)
            if "goodput_of_commands" in last:
                print_field(
                    "goodput",
                    f"{last['goodput_of_commands']:.1%} of its commands' time, {last['goodput']:.1%} of the time "
                    "since the first one began",
                )
    for event in read_events(path):
        if event.get("changed"):
            print_field("settings", f"changed at step {event.get('step')}: {event['changed']}")
    for loss in read_records(str(path))[-MAX_LOSSES:]:
        print_field(
            "node",
            f"{loss.get('kind')} {loss.get('time')}  {loss.get('node')}: {loss.get('reason')}",
        )
    for newest in sorted(path.glob(TASK_RESULTS.format("*")))[-1:]:
        print_field("tasks", newest)
    for followed in sorted(path.glob(f"{EVALUATIONS}/*.jsonl")):
        print_field("evaluations", followed)
    if verify or place.names:
        return checkpoints.main(str(path), checkpoints.Options(verify))
    return 0


def _show_settings(run: Path) -> None:
    """Prints the progress, the model and the data of a run, and the command that continues it. Prints the error instead if
    config.yaml can't be read."""
    try:
        settings = read_run(run)
    except UserError as error:
        print_field("settings", error)
        return
    for start in read_starts(run)[-1:]:
        print_field("last start", f"{start.get('time')}, from {start.get('from')}")
    if settings:
        print_field(
            "progress",
            f"{newest_step(run)} of {settings.value('num_steps')} steps are saved, "
            f"learning rate {settings.optimizer.learning_rate:g}",
        )
        print_field("model", describe_model(settings.model))
        print_field("data", settings.data.dataset_path)
        more = " --num_steps=MORE" if read_status(run).get("status") == "finished" else ""
        print_field("to continue", f"{command('train')} --config={run / SETTINGS}{more}")


def _format_status(run: Path) -> str:
    """Formats the status of a run and its reason."""
    status = read_status(run)
    parts = [str(status[key]) for key in ("status", "reason") if status.get(key)]
    return ": ".join(parts) or f"unknown: no {STATUS}"


def show_checkpoints(place: PathInfo, verify: bool) -> int:
    return checkpoints.main(str(place.path), checkpoints.Options(verify))


def show_checkpoint(place: PathInfo, verify: bool) -> int:
    from mamba_fsdp.checkpoint.saved_run import read_saved_run

    path = place.path
    print_field("checkpoint", path)
    code = checkpoints.main(str(path), checkpoints.Options(verify))
    if code:
        return code
    run = read_saved_run(path)
    progress = run.progress
    print_field(
        "tokens", f"{progress.tokens:,}, {format_count(progress.skipped_steps, 'step')} skipped"
    )
    print_field("written by", f"{format_count(run.world_size, 'rank')}, torch {run.torch}")
    print_field("data", json.dumps(progress.data.get("drawn")))
    print_field("model", describe_model(parse_model_config(path, run.model)))
    return 0


def show_input(place: PathInfo) -> None:
    """Prints the input that get_dataset.py would read, its first document, and the command that imports it."""
    from mamba_fsdp.importing.reading import Share, read_batches  # imports datasets, which is slow

    # With skip_unreadable, missing files are listed below instead of raising an error.
    options = DatasetConfig(skip_unreadable=True)
    left_out = LeftOut()
    files = find_files(str(place.path), options, left_out)
    print_field("data", f"{format_count(len(files), 'file')}: {place.title}")
    for line in left_out.lines():
        print(line)
    try:
        for batch in itertools.islice(read_batches(Share(files[:1]), DatasetConfig(), size=1), 1):
            print_field("begins with", repr(batch.documents[0].content)[:SAMPLE_WIDTH])
        print_field("to use it", place.use)
    except UserError as error:
        print_field("to use it", f"{import_command(place.path)}, but {error}")


def show_model(path: Path) -> None:
    from mamba_fsdp.interop.weights import read_weights
    from mamba_fsdp.model.spec import parameter_count

    if is_file(path) and not is_file(path.parent / MODEL_CONFIG):
        show_tensors(path)
        return
    weights = read_weights(path)
    print_field("model", path)
    print_field("structure", describe_model(weights.config))
    print_field("parameters", f"{parameter_count(weights.config):,}")
    print_field("tokenizer", weights.tokenizer_path or "none")


def show_tensors(path: Path) -> None:
    """Prints the names and shapes of the tensors in a file that has no config.json next to it."""
    from mamba_fsdp.interop.weights import open_file

    shapes = open_file(path).shapes
    numbers = sum(math.prod(shape) for shape in shapes.values())
    print_field("tensors", f"{path}: {len(shapes)}, {numbers:,} numbers")
    print_field(
        "to use it",
        f"there is no {MODEL_CONFIG} next to it; name its preset, as in --model_name=mamba-130m",
    )
    for name, shape in shapes.items():
        print_field("", f"{name:<64} {shape}")


def describe_model(model: ModelConfig) -> str:
    return (
        f"{model_title(model)}, {format_count(model.n_layer, 'layer')} {model.layers}, d_model {model.d_model}, "
        f"vocabulary {model.vocab_size:,}"
    )


def show_stores(place: PathInfo, verify: bool) -> int:
    for name in place.names:
        folder = place.path / name
        stores = [split_in(folder, split) for split in SPLITS]
        for store in dict.fromkeys(filter(is_store, stores)):
            show_store(classify_path(store), verify)
    print_field("to use it", place.use)
    return 0


def show_store(place: PathInfo, verify: bool) -> int:
    """Prints a description of a token store, and verifies its checksums if `verify` is set. Raises UserError if it is
    damaged."""
    path = place.path
    store = TokenStore(path)
    print_field("token store", path)
    if verify:
        store.verify()
        print_field("verified", "every byte was read; all sizes and checksums are correct")
    print_field(
        "tokens", f"{store.token_count:,} in {format_count(store.document_count, 'document')}"
    )
    print_field("vocabulary", f"{store.vocab_size:,}, eos {store.eos}, {store.dtype.name}")
    _show_samples(store)
    return 0


def _show_samples(store: TokenStore) -> None:
    """Prints the path of the store's tokenizer, and samples of the store's text if there is a tokenizer."""
    try:
        folder = store.tokenizer_path
    except UserError:
        print_field("tokenizer", "none")
        return
    print_field("tokenizer", folder)
    words = load_for_prompts(folder)
    for number in range(SAMPLES):
        start = store.token_count * number // SAMPLES
        tokens = store.read(start, min(SAMPLE_TOKENS, store.token_count - start)).tokens
        if tokens.max() < words.vocab_size:
            print_field(f"at {start:,}", repr(words.decode(tokens.tolist()))[:SAMPLE_WIDTH])


# The kinds of places that have checksums: {kind: a function that prints a description and returns the exit code}.
CHECKSUMMED_KINDS = {
    "run": show_run,
    "runs": show_runs,
    "checkpoint": show_checkpoint,
    "checkpoints": show_checkpoints,
    "store": show_store,
    "stores": show_stores,
}
