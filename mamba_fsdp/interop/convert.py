"""Writes models in the formats of other libraries and of this program. The output folder appears only when it is complete."""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mamba_fsdp.checkpoint.folder import check_same_tensors
from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.data.tokenizer import load_for_transformers
from mamba_fsdp.errors import UserError
from mamba_fsdp.importing.kinds import TOKENIZER_FILES
from mamba_fsdp.interop import state_spaces
from mamba_fsdp.interop.architectures import architecture_for, exportable
from mamba_fsdp.interop.fields import Table
from mamba_fsdp.interop.pth_files import write_pth
from mamba_fsdp.interop.safetensors_files import SINGLE, write_safetensors
from mamba_fsdp.interop.trial import try_export
from mamba_fsdp.interop.weights import PICKLED, Weights, read_weights
from mamba_fsdp.model.spec import EMBEDDING, LM_HEAD, parameters
from mamba_fsdp.run.lease import new_folder
from mamba_fsdp.run.names import CONSOLIDATED, MODEL_CONFIG, TOKENIZER
from mamba_fsdp.storage.retry import (
    copy_file,
    is_file,
    make_folder,
    sync_folder,
)
from mamba_fsdp.storage.typed_json import read_object, write_object

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
OTHER_FORMATS = (
    "--format=pth writes this program's own format, --format=state-spaces the format of mamba_ssm"
)
ELEMENTS_PER_CHUNK = 1 << 18  # the number of elements of a mean to compute at a time
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"


def write_model(
    source: str | Path,
    out: str | Path,
    format: str = "hf",
    dtype: str = "",
    *,
    tokenizer: str = "",
    model_name: str = "",
    trial: bool = True,
) -> Path:
    """Writes a model to the new folder `out`, and returns `out`.

    source: the path of the model, see find_weights. format: "hf" for transformers; "state-spaces"; "pth" for
    consolidated.00.pth with config.json and tokenizer/. dtype: "fp32", "bf16" or "fp16"; "" keeps the stored dtypes. A_log, D
    and the biases of dt are always fp32. tokenizer: a folder with the tokenizer to write in place of the model's. model_name:
    see read_weights. trial: whether to test the export with transformers before `out` appears.

    Raises UserError, and writes nothing, if the model can't be read, the format can't represent it, `out` exists, the disk
    can't be written, or the trial fails.
    """
    out = Path(out)
    with new_folder(out) as unfinished:
        weights = read_weights(source, model_name=model_name)
        if tokenizer:
            weights.use_tokenizer(Path(tokenizer))
        _write_all(unfinished, weights, format, dtype)
        if format == "hf" and trial:
            config = exportable(weights.config)
            write_hf = partial(_write_all, format="hf", dtype="")
            line = try_export(unfinished, architecture_for(config), config, write_hf)
            print(line, file=sys.stderr)
    return out


def publish(source: str | Path, folder: Path) -> None:
    """Writes a model in the format pth into the new folder `folder`.

    source: the path of the model. The parent of `folder` must exist. It is not created, because a process that takes over the
    run moves the parent away, and this write must then fail. Raises UserError if the model can't be read, and OSError or
    UserError if it can't be written."""
    weights = read_weights(source)
    make_folder(folder)
    _write_all(folder, weights, "pth", "")


def _write_all(folder: Path, weights: Weights, format: str, dtype: str) -> None:
    """Writes the files of a model, and returns when they are on the disk."""
    fields = WRITERS[format](folder, weights, dtype)
    write_object(folder / MODEL_CONFIG, fields)
    if weights.tokenizer_path:
        _copy_tokenizer(weights.tokenizer_path, folder / TOKENIZER if format == "pth" else folder)
    if format == "hf":
        _pad_with_eos(folder / TOKENIZER_CONFIG)
    sync_folder(folder)


def write_mean(checkpoints: Sequence[Path], shares: Sequence[float], out: Path) -> None:
    """Writes the weighted mean of checkpoints into the new folder `out`, in fp32, with one tensor in memory at a time.

    shares: the weight of each checkpoint; their sum is 1. Raises UserError if a checkpoint can't be read, the models are
    different, `out` exists, or the disk can't be written."""
    with new_folder(out) as unfinished:
        models = [read_weights(path) for path in checkpoints]
        newest = models[-1]
        for model in models:
            check_same_tensors(model.source, newest.shapes, model.shapes)
            described = {**vars(model.config), "tokenizer": model.tokenizer}
            wanted = {**vars(newest.config), "tokenizer": newest.tokenizer}
            different = [name for name, value in wanted.items() if described[name] != value]
            if different:
                raise UserError(
                    f"{model.source} and {newest.source} can't be averaged, because the models differ in "
                    f"{', '.join(different)}; choose checkpoints of one run"
                )

        def mean_of(name: str) -> Tensor:
            mean = torch.zeros(newest.shapes[name])
            start = 0
            for piece in mean.view(-1).split(ELEMENTS_PER_CHUNK):
                total = piece.double()
                for model, share in zip(models, shares):
                    total.add_(model.slice(name, start, start + len(piece)), alpha=share)
                piece.copy_(total)
                start += len(piece)
            return mean

        names = [*newest.shapes]
        write_safetensors(unfinished / SINGLE, names, partial(map, mean_of, names))
        fields = dict(vars(newest.config), seq_length=newest.seq_length)
        fields["averaged"] = dict(zip(map(str, checkpoints), shares))
        write_object(unfinished / MODEL_CONFIG, fields)
        if newest.tokenizer_path:
            _copy_tokenizer(newest.tokenizer_path, unfinished / TOKENIZER)


# Each of the following functions writes the tensors of one format, and returns the fields of its config.json.


def _write_hf(folder: Path, weights: Weights, dtype: str) -> Table:
    try:
        config = exportable(weights.config)
    except UserError as error:
        raise UserError(f"{error}; {OTHER_FORMATS}") from None
    architecture = architecture_for(config)
    fields = architecture.write_config(config)
    tokenizer = None
    if weights.tokenizer_path:
        tokenizer = load_for_transformers(weights.tokenizer_path)
    # Without a tokenizer the ids are null, because the defaults of transformers would be arbitrary tokens.
    ids = {kind: getattr(tokenizer, kind, None) for kind in TOKEN_IDS}
    fields |= ids
    if ids["eos_token_id"] is not None:
        set_ids = {kind: number for kind, number in ids.items() if number is not None}
        generation = {"pad_token_id": ids["eos_token_id"], **set_ids}
        padding = [*range(config.vocab_size, config.padded_vocab_size)]
        if padding:  # as in our own generation, tokens that only pad the vocabulary are never drawn
            generation["suppress_tokens"] = padding
        write_object(folder / GENERATION_CONFIG, generation)
    embedding = _read_as(dtype, weights, EMBEDDING)
    fields["torch_dtype"] = str(embedding.dtype).removeprefix("torch.")
    if weights.seq_length and weights.config.has_mixer("attention"):
        fields.setdefault("max_position_embeddings", weights.seq_length)

    stored_tensors = architecture.stored_tensors(config)
    written = parameters(config)

    def tensors() -> Iterator[Tensor]:
        for our_name, stored in stored_tensors.items():
            if our_name in weights.shapes:
                whole = _read_as(dtype, weights, our_name, stored[0].shift)
            else:  # a tensor of silent attention, see silent_attention.py
                whole = torch.zeros(written[our_name].shape, dtype=embedding.dtype)
            if our_name.endswith(tuple(architecture.swapped)):
                whole = whole.roll(len(whole) // 2, 0)
            yield from whole.split([tensor.shape[0] for tensor in stored])

    names = [tensor.name for stored in stored_tensors.values() for tensor in stored]
    write_safetensors(folder / SINGLE, names, tensors)
    return fields


def _write_state_spaces(folder: Path, weights: Weights, dtype: str) -> Table:
    fields = state_spaces.write_config(weights.config)
    _write_state_dict(folder / PICKLED, weights, dtype)
    return fields


def _write_ours(folder: Path, weights: Weights, dtype: str) -> Table:
    fields = dict(vars(weights.config))
    if weights.seq_length:
        fields["seq_length"] = weights.seq_length
    _write_state_dict(folder / CONSOLIDATED, weights, dtype)
    return fields


WRITERS = {"hf": _write_hf, "state-spaces": _write_state_spaces, "pth": _write_ours}


def _write_state_dict(path: Path, weights: Weights, dtype: str) -> None:
    """Writes a plain dict of tensors. A tied output layer is stored under both of its names."""
    tied = {}
    if weights.config.tie_embeddings:
        tied[LM_HEAD] = EMBEDDING
    names = list(weights.shapes)

    def tensors() -> Iterator[Tensor]:
        return (_read_as(dtype, weights, name) for name in names)

    write_pth(path, names, tensors, tied)


def _read_as(dtype: str, weights: Weights, name: str, shift: float = 0.0) -> Tensor:
    """Returns a parameter minus `shift`, in the dtype to write."""
    tensor = weights.get(name)
    if shift:
        tensor = tensor - shift
    if dtype and not weights.parameters[name].fp32:
        return tensor.to(DTYPES[dtype])
    return tensor


def _pad_with_eos(file: Path) -> None:
    """Sets the pad token of an export to eos if there is none, because transformers needs one to pad prompts of different
    lengths."""
    if is_file(file):
        fields = read_object(file, dict[str, Any], "copy the tokenizer again")
        if fields.get("eos_token") and not fields.get("pad_token"):
            write_object(file, {**fields, "pad_token": fields["eos_token"]})


def _copy_tokenizer(source: Path, folder: Path) -> None:
    make_folder(folder)
    for name in TOKENIZER_FILES:
        if is_file(source / name):
            copy_file(source / name, folder / name)
    sync_folder(folder)
