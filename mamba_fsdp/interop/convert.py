"""Models into other libraries' forms and into ours: a whole new folder, or none."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.durable import hidden_beside, sync_folder
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop import state_spaces, transformers_forms
from mamba_fsdp.interop.safetensors_files import SHARD_BYTES, write_safetensors
from mamba_fsdp.interop.weights import PICKLED, TOKENIZER_FILES, load_tokenizer, read_weights
from mamba_fsdp.model.spec import EMBEDDING, LM_HEAD, parameters
from mamba_fsdp.run_layout import CONSOLIDATED, MODEL_CONFIG, TOKENIZER


def to_foreign_form(source, out, format="hf", dtype=None, shard_bytes=SHARD_BYTES):
    """Write the model that `source` names (see read_weights) to the new folder `out` in the form of transformers or
    state-spaces.

    dtype: fp32, bf16, fp16; None keeps the stored types. A_log, D and the biases of dt stay fp32. The tokenizer goes
    along. Raises UserError: nothing to read, no such form of this model, `out` exists, the disk refuses; then nothing
    is written.
    """
    writers = {"hf": _write_transformers, "state-spaces": _write_state_spaces}
    if format not in writers:
        raise UserError(f"format={format}: write one of {', '.join(writers)}")
    return _convert(source, out, dtype, lambda folder, weights, get: writers[format](folder, weights, get, shard_bytes))


def to_our_form(source, out, dtype=None):
    """Write the model that `source` names (see read_weights) to the new folder `out` in our form: consolidated.00.pth,
    its config.json, tokenizer/. Raises UserError as `to_foreign_form` does."""
    return _convert(source, out, dtype, _write_ours)


def _convert(source, out, dtype, write):
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype={dtype}: write one of {', '.join(DTYPES)}")
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists already; name a new folder, or remove it first")
    weights = read_weights(source)
    spec = parameters(weights.config)

    def get(name):
        tensor = weights.get(name)
        keep = dtype is None or spec[name].fp32
        return tensor if keep else tensor.to(DTYPES[dtype])

    partial = hidden_beside(out)
    try:
        partial.mkdir(parents=True)
        write(partial, weights, get)
        _flush(partial)
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"can't write {out}: {getattr(error, 'strerror', None) or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sync_folder(out.parent)
    return out


def _write_transformers(folder, weights, get, shard_bytes):
    form = transformers_forms.form_for(weights.config)
    fields = transformers_forms.write_config(form, weights.config)
    fields |= _token_ids(weights.tokenizer_path)
    fields["torch_dtype"] = str(get(EMBEDDING).dtype).removeprefix("torch.")
    if weights.seq_length and weights.config.has("attention"):
        fields["max_position_embeddings"] = weights.seq_length
    _write_json(folder / MODEL_CONFIG, fields)
    write_safetensors(folder, _split(transformers_forms.parts(form, weights.config), get), shard_bytes)
    _copy_tokenizer(weights.tokenizer_path, folder)


def _split(parts, get):
    for name, theirs in parts.items():
        for (their_name, _), rows in zip(theirs, get(name).split([shape[0] for _, shape in theirs])):
            yield their_name, rows


def _write_state_spaces(folder, weights, get, _):
    _write_json(folder / MODEL_CONFIG, state_spaces.write_config(weights.config))
    _write_state_dict(folder / PICKLED, weights, get)
    _copy_tokenizer(weights.tokenizer_path, folder)


def _write_ours(folder, weights, get):
    _write_json(folder / MODEL_CONFIG,
                vars(weights.config) | ({"seq_length": weights.seq_length} if weights.seq_length else {}))
    _write_state_dict(folder / CONSOLIDATED, weights, get)
    if weights.tokenizer_path:
        (folder / TOKENIZER).mkdir()
        _copy_tokenizer(weights.tokenizer_path, folder / TOKENIZER)


def _write_state_dict(path, weights, get):
    """A plain dict of tensors, a tied output layer under both names."""
    content = {name: get(name) for name in weights.names}
    if weights.config.tie_embeddings:
        content[LM_HEAD] = content[EMBEDDING]
    with open(path, "xb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's own, raised on the way out of what the disk said
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def _write_json(path, content):
    path.write_text(json.dumps(content, indent=2) + "\n")


def _token_ids(tokenizer_path):
    """bos, eos and pad as the tokenizer has them; transformers' defaults mean other tokens in every model."""
    kinds = ("bos_token_id", "eos_token_id", "pad_token_id")
    if not tokenizer_path:
        return dict.fromkeys(kinds)
    tokenizer = load_tokenizer(tokenizer_path)
    return {kind: getattr(tokenizer, kind) for kind in kinds}


def _copy_tokenizer(source, folder):
    for name in TOKENIZER_FILES if source else ():
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, folder / name)


def _flush(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        else:
            sync_folder(path)
    sync_folder(folder)
