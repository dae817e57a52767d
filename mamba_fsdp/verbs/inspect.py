"""python -m mamba_fsdp inspect PATH [--tensors] [--verify] [--tokenizer=FOLDER] [--eos_token=ID]

Say what PATH holds: a run folder, a checkpoint or a rank's file of one, a model (consolidated.00.pth, transformers,
state-spaces, other trainers' files; of one without config.json, its tensors), or data: a token store, or tokens in
another format (docs/data.md).

  --tensors   list every tensor with its shape and type
  --verify    read every byte: of a token store, compared with the checksums; of a checkpoint or a run, as
              python -m mamba_fsdp checkpoints does; of other data, which has none, to speak of all of it and not of
              samples. Exits with 1 or 2 where anything is damaged. Refuses models, which hold no checksums

How to read data in other formats, as in training: --tokenizer (also shows samples), --eos_token, --bos_token,
--strip_tokens, --col_name, --pack, --index_dir
"""

import json
import math
from pathlib import Path

from config.model_config import ModelConfig, checked_model
from config.presets import title
from config.train_config import USUAL_READING, ReadingConfig
from mamba_fsdp.errors import UserError
from mamba_fsdp.report.display import say, scaled
from mamba_fsdp.run_layout import CHECKPOINTS, COMMIT, CONSOLIDATED, METRICS, MODEL_CONFIG, MODELS, STATUS, committed
from mamba_fsdp.verbs import checkpoints


def main(path: str, tensors: bool = False, verify: bool = False, reading: ReadingConfig = USUAL_READING) -> int:
    place = Path(path)
    if (place.parent / COMMIT).is_file() and place.is_file():
        say("part", f"{place.name}, {size(place)}, of the checkpoint that follows")
        place = place.parent
    if (place / CHECKPOINTS).is_dir() or (place / STATUS).is_file():
        show_run(place)
    elif (place / COMMIT).is_file():
        show_checkpoint(place, tensors)
    elif is_data(place):
        from mamba_fsdp.data.opening import split_in
        from mamba_fsdp.verbs.inspect_data import show_data

        held_out = split_in(place, "validation")
        for part in [split_in(place), *[held_out] * (held_out != place)]:
            show_data(part, reading, verify)
    elif verify:
        raise UserError(f"{path}: --verify is for token stores, checkpoints and runs; this holds no checksums")
    else:
        show_model(place, tensors)
    if verify and ((place / CHECKPOINTS).is_dir() or (place / COMMIT).is_file()):
        return checkpoints.main(str(place), verify=True)
    return 0


def show_run(path: Path) -> None:
    from mamba_fsdp.report.display import read_share
    from mamba_fsdp.report.records import read
    from mamba_fsdp.train.run_folder import RunFolder

    status, entries = RunFolder(path).status(), read(path / METRICS)
    say("run", path)
    told = " ".join(str(status[key]) for key in ("status", "reason", "time") if status.get(key))
    say("status", told or f"unknown: no {STATUS}")
    for kind, name in (("loss", "training"), ("val_loss", "validation")):
        if values := [entry for entry in entries if entry.get(kind) is not None]:
            last, ends = values[-1], values[:1] + values[1:][-1:]
            part = f" ({read_share(last['val_share'])})" if kind in last and "val_share" in last else ""
            say(name, "loss " + ", ".join(f"{end[kind]:.4f} at step {end['step']}" for end in ends) + part)
    for checkpoint in committed(path / CHECKPOINTS):
        say("checkpoint", f"{checkpoint} ({size(checkpoint)})")
    for model in sorted(path.glob(f"{MODELS}/*/{CONSOLIDATED}")):
        say("model", f"{model} ({size(model)})")


def show_checkpoint(path: Path, tensors: bool) -> None:
    from mamba_fsdp.checkpoint.folder import Reader

    reader = Reader(path)
    state, progress = reader.state, reader.state["progress"]
    say("checkpoint", path)
    say("step", f"{progress['step']:,}, {progress['tokens']:,} tokens, {progress['skipped_steps']} steps skipped")
    say("written by", f"{state['world_size']} ranks, torch {state['torch']}")
    say("data", json.dumps(progress["data"]["drawn"]))
    say("model", describe_model(checked_model(path, state["settings"]["model"])))
    say("size", f"{size(path)} in {len(reader.files)} files, {len(reader.tensors)} tensors")
    if tensors:
        for name, entry in sorted(reader.tensors.items()):
            pieces = len(reader.layouts[entry["layout"]]["files"])
            print(f"  {name:<64} {str(tuple(entry['shape'])):<20} {entry['dtype']:<6} in {pieces} pieces")


def is_data(place: Path) -> bool:
    """Whether PATH is data and no model. Raises UserError where there is nothing."""
    from mamba_fsdp.data.opening import is_source, refuse_text, split_in

    if (place / MODEL_CONFIG).is_file():
        return False
    if is_source(split_in(place)):
        return True
    if not place.exists():
        raise UserError(f"{place}: there is no such file or folder")
    refuse_text(place)
    return False


def show_model(path: Path, tensors: bool) -> None:
    from mamba_fsdp.interop.weights import read_weights
    from mamba_fsdp.model.spec import parameter_count, parameters

    if path.is_file() and not (path.parent / MODEL_CONFIG).is_file():
        show_tensors(path)
        return
    weights = read_weights(path)
    say("model", path)
    say("structure", describe_model(weights.config))
    say("parameters", f"{parameter_count(weights.config):,}")
    say("tokenizer", weights.tokenizer_path or "none")
    if tensors:
        for name, parameter in parameters(weights.config).items():
            print(f"  {name:<64} {str(parameter.shape):<20} {str(weights.get(name).dtype).removeprefix('torch.')}")


def show_tensors(path: Path) -> None:
    """What a file without config.json beside it holds."""
    from mamba_fsdp.interop.prior import guess
    from mamba_fsdp.interop.weights import open_file
    from mamba_fsdp.parallel.world import World

    found = open_file(path, World.alone())
    config = guess(found)
    say("tensors", f"{path}: {len(found.shapes)}, {sum(map(math.prod, found.shapes.values())):,} numbers")
    say("structure", f"{describe_model(config)}, as its tensors tell" if config else "that of no preset")
    say("to use it", f"there is no {MODEL_CONFIG} beside it, so name its preset: --model_name="
                     f"{config.model_name if config else 'PRESET'}")
    for name, shape in found.shapes.items():
        print(f"  {name:<64} {shape}")


def describe_model(model: ModelConfig) -> str:
    return (f"{title(model)}, {model.n_layer} layers {model.layers}, d_model {model.d_model}, "
            f"vocabulary {model.vocab_size:,}")


def size(path: Path) -> str:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return scaled(sum(file.stat().st_size for file in files), "B")
