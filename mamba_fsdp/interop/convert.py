"""Models written as other libraries read them, and as ours does: a whole new folder, or none."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mamba_fsdp.checkpoint.retention import new_folder
from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.data.tokenizer import load_for_transformers
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop import state_spaces
from mamba_fsdp.interop.pth_files import write_pth
from mamba_fsdp.interop.safetensors_files import SINGLE, write_safetensors
from mamba_fsdp.interop.transformers_layouts import layout_for
from mamba_fsdp.interop.weights import PICKLED, TOKENIZER_FILES, Weights, read_weights
from mamba_fsdp.model.spec import EMBEDDING, LM_HEAD, parameters
from mamba_fsdp.run_layout import CONSOLIDATED, MODEL_CONFIG, TOKENIZER

FORMATS = ("hf", "state-spaces", "pth")
GENERATION_CONFIG = "generation_config.json"
Get = Callable[[str], torch.Tensor]  # a parameter by our name, in the type to be written


def write_model(
    source: str | Path,
    out: str | Path,
    format: str = "hf",
    dtype: str = "",
    *,
    tokenizer: str = "",
    model_name: str = "",
    verified: bool = False,
) -> Path:
    """Writes the model that `source` names (see find_weights) to the new folder `out`; returns `out`.

    format: hf, of transformers; state-spaces; pth, which is consolidated.00.pth, its config.json and tokenizer/. dtype:
    fp32, bf16, fp16; empty keeps the stored types. A_log, D and the biases of dt stay fp32. tokenizer: the folder of one
    to go along instead of the model's.
    model_name, verified: see read_weights. Raises UserError: nothing to read, the format can't hold this model, `out` exists, the
    disk refuses; then nothing is written.
    """
    if format not in FORMATS:
        raise UserError(f"format={format}: write one of {', '.join(FORMATS)}")
    if dtype and dtype not in DTYPES:
        raise UserError(f"dtype={dtype}: write one of {', '.join(DTYPES)}")
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists already; name a new folder, or remove it first")
    weights = read_weights(source, model_name=model_name, verified=verified)
    if tokenizer:
        weights.use_tokenizer(Path(tokenizer))
    spec = parameters(weights.config)

    def get(name):
        tensor = weights.get(name)
        if dtype and not spec[name].fp32:
            tensor = tensor.to(DTYPES[dtype])
        return tensor

    with new_folder(out) as unfinished:
        if format == "hf":
            fields = _write_hf(unfinished, weights, get)
        elif format == "state-spaces":
            fields = state_spaces.write_config(weights.config)
            _write_state_dict(unfinished / PICKLED, weights, get)
        else:
            fields = dict(vars(weights.config))
            if weights.seq_length:
                fields["seq_length"] = weights.seq_length
            _write_state_dict(unfinished / CONSOLIDATED, weights, get)
        (unfinished / MODEL_CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
        if weights.tokenizer_path:
            folder = unfinished
            if format == "pth":
                folder = unfinished / TOKENIZER
            _copy_tokenizer(weights.tokenizer_path, folder)
    return out


write_pth_folder = partial(write_model, format="pth")


def publish(source: str | Path, out: Path, *, verified: bool = False) -> None:
    """Writes `source` as pth, unless `out` is there."""
    try:
        write_pth_folder(source, out, verified=verified)
    except UserError:
        if not out.exists():  # else another process was faster
            raise


def _write_hf(folder: Path, weights: Weights, get: Get) -> dict[str, Any]:
    """Writes all but config.json, whose fields it returns."""
    layout = layout_for(weights.config)
    tokenizer = None
    if weights.tokenizer_path:
        tokenizer = load_for_transformers(weights.tokenizer_path)
    fields = layout.write_config(weights.config)
    ids = {}
    for kind in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # Without a tokenizer they are null: transformers' defaults mean other tokens in every model.
        fields[kind] = getattr(tokenizer, kind, None)
        if fields[kind] is not None:
            ids[kind] = fields[kind]
    fields["torch_dtype"] = str(get(EMBEDDING).dtype).removeprefix("torch.")
    if weights.seq_length and weights.config.has("attention"):
        fields.setdefault("max_position_embeddings", weights.seq_length)

    parts_of = layout.parts(weights.config)

    def tensors():
        for name, parts in parts_of.items():
            whole = get(name)
            if name.endswith(tuple(layout.swapped)):
                whole = whole.roll(len(whole) // 2, 0)
            yield from whole.split([shape[0] for _, shape in parts])

    their_names = [their_name for parts in parts_of.values() for their_name, _ in parts]
    write_safetensors(folder / SINGLE, their_names, tensors())
    if "eos_token_id" in ids:
        generation = {"pad_token_id": ids["eos_token_id"], **ids}
        (folder / GENERATION_CONFIG).write_text(json.dumps(generation, indent=2) + "\n")
    return fields


def _write_state_dict(path: Path, weights: Weights, get: Get) -> None:
    """Writes a plain dict of tensors, a tied output layer under both names."""
    tied = {}
    if weights.config.tie_embeddings:
        tied[LM_HEAD] = EMBEDDING
    write_pth(path, ((name, get(name)) for name in weights.names), tied)


def _copy_tokenizer(source, folder):
    folder.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
