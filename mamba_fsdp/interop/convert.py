"""Models into other libraries' forms and into ours: a whole new folder, or none."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

import mamba_fsdp
from config.presets import title
from mamba_fsdp.checkpoint.folder import Reader
from mamba_fsdp.checkpoint.retention import new_folder
from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.data.tokenizer import load_for_transformers
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop import state_spaces, transformers_forms
from mamba_fsdp.interop.pth_files import write_pth
from mamba_fsdp.interop.safetensors_files import SHARD_BYTES, write_safetensors
from mamba_fsdp.interop.weights import PICKLED, TOKENIZER_FILES, read_weights
from mamba_fsdp.model.spec import EMBEDDING, LM_HEAD, parameter_count, parameters
from mamba_fsdp.run_layout import COMMIT, CONSOLIDATED, MODEL_CONFIG, TOKENIZER

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MODEL_CARD, GENERATION_CONFIG = "README.md", "generation_config.json"


def write_model(
    source: str | Path,
    out: str | Path,
    format: str = "hf",
    dtype: str = "",
    *,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: str = "",
    allow_other_tokenizer: bool = False,
    **how: Any,
) -> Path:
    """Write the model that `source` names (see find_weights) to the new folder `out`; returns `out`.

    format: hf, of transformers; state-spaces; pth, which is consolidated.00.pth, its config.json and tokenizer/.
    dtype: fp32, bf16, fp16; empty keeps the stored types. A_log, D and the biases of dt stay fp32. tokenizer: the folder
    of one to go along instead of the model's, which has to be the same where that is known, unless
    allow_other_tokenizer. how: see read_weights. Raises UserError: nothing to read, no such form of this model, `out`
    exists, the disk refuses; then nothing is written.
    """
    writers: dict[str, Any] = {
        "hf": partial(_write_transformers, shard_bytes=shard_bytes),
        "state-spaces": _write_state_spaces,
        "pth": _write_ours,
    }
    for option, value, known in (("format", format, writers), ("dtype", dtype or "fp32", DTYPES)):
        if value not in known:
            raise UserError(f"{option}={value}: write one of {', '.join(known)}")
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists already; name a new folder, or remove it first")
    weights = read_weights(source, **how)
    if tokenizer:
        weights.use_tokenizer(Path(tokenizer), allow_other_tokenizer)
    spec = parameters(weights.config)

    def get(name):
        tensor = weights.get(name)
        return tensor if not dtype or spec[name].fp32 else tensor.to(DTYPES[dtype])

    try:
        with new_folder(out) as unfinished:
            fields = writers[format](unfinished, weights, get)
            (unfinished / MODEL_CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
            if format != "pth":
                stored = str(get(EMBEDDING).dtype).removeprefix("torch.")
                (unfinished / MODEL_CARD).write_text(_model_card(weights, format, stored))
            if weights.tokenizer_path:
                _copy_tokenizer(
                    weights.tokenizer_path,
                    unfinished / TOKENIZER if format == "pth" else unfinished,
                )
    except SafetensorError as error:
        raise UserError(f"can't write {out}: {error}") from None
    return out


to_our_form = partial(write_model, format="pth")


def publish(source: Path, out: Path, **how: Any) -> None:
    """to_our_form, unless `out` is there."""
    try:
        to_our_form(source, out, **how)
    except UserError:
        if not out.exists():  # else another process was faster
            raise


def _write_transformers(folder, weights, get, shard_bytes):
    """Writes the tensors and returns the fields of config.json, as the writers below."""
    form = transformers_forms.form_for(weights.config)
    tokenizer = load_for_transformers(weights.tokenizer_path) if weights.tokenizer_path else None
    # Those of no tokenizer are null: transformers' defaults mean other tokens in every model.
    ids = {kind: getattr(tokenizer, kind, None) for kind in TOKEN_IDS}
    fields = form.write_config(weights.config) | ids
    fields["torch_dtype"] = str(get(EMBEDDING).dtype).removeprefix("torch.")
    if weights.seq_length and weights.config.has("attention"):
        fields["max_position_embeddings"] = weights.seq_length
    tensors = (
        (their_name, rows)
        for name, theirs in transformers_forms.parts(form, weights.config).items()
        for (their_name, _), rows in zip(theirs, get(name).split([shape[0] for _, shape in theirs]))
    )
    write_safetensors(folder, tensors, shard_bytes)
    known = {kind: number for kind, number in ids.items() if number is not None}
    if "eos_token_id" in known:
        generation = {"pad_token_id": ids["eos_token_id"], **known}
        (folder / GENERATION_CONFIG).write_text(json.dumps(generation, indent=2) + "\n")
    return fields


def _write_state_spaces(folder, weights, get):
    fields = state_spaces.write_config(weights.config)
    _write_state_dict(folder / PICKLED, weights, get)
    return fields


def _write_ours(folder, weights, get):
    _write_state_dict(folder / CONSOLIDATED, weights, get)
    return vars(weights.config) | ({"seq_length": weights.seq_length} if weights.seq_length else {})


def _write_state_dict(path, weights, get):
    """A plain dict of tensors, a tied output layer under both names."""
    write_pth(
        path,
        ((name, get(name)) for name in weights.names),
        {LM_HEAD: EMBEDDING} if weights.config.tie_embeddings else {},
    )


def _copy_tokenizer(source, folder):
    folder.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _model_card(weights, format, dtype):
    """What the model is, how it was trained as far as that is known, how to load it. dtype: of the stored numbers."""
    config, training = weights.config, "How it was trained is not known."
    if (Path(weights.source) / COMMIT).is_file():
        state = Reader(weights.source).state
        data, progress = state["settings"]["data"], state["progress"]
        training = (
            f"Trained for {progress['step']:,} steps on {progress['tokens']:,} tokens of "
            f"{Path(data['dataset_path']).name} in sequences of {data['seq_length']:,}."
        )
    card = Path(__file__).parent / "cards" / f"{format}.md"
    return card.read_text(encoding="utf-8").format(
        title=title(config),
        parameters=parameter_count(config),
        dtype=dtype,
        config=config,
        training=training,
        version=mamba_fsdp.__version__,
    )
