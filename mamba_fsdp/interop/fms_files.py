"""Checkpoints of fms-fsdp, Composer and others: the model among all that a file holds, and fms' Llama under our names.

fms-fsdp keeps the model under `model_state`, Composer under `state.model` and the name of a field of its own; compiled
and wrapped modules leave words of their own in the names. What a file holds beside the model is passed over.
"""

import re

import torch

from mamba_fsdp.checkpoint.tensors import Tensors
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.fields import TABLES
from mamba_fsdp.interop.transformers_layouts import LAYOUTS
from mamba_fsdp.model.spec import EMBEDDING
from mamba_fsdp.settings.model_config import ModelConfig

WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
FMS_TOP: dict[str, str] = TABLES["fms"]["top"]
FMS_LAYER: dict[str, str] = TABLES["fms"]["layer"]
FMS_ORDER = list(FMS_LAYER)  # of those that are parts of one of ours
FMS_EMBEDDINGS = {name for name, ours in FMS_TOP.items() if ours == EMBEDDING}
EMBEDDINGS = {EMBEDDING, *FMS_EMBEDDINGS, *(layout.top[EMBEDDING] for layout in LAYOUTS)}


def find_model(tensors: Tensors) -> Tensors:
    """Returns the tensors of the model among all, under the names that the model gave them: where its embedding is, the
    rest is. Raises UserError where there are two models."""
    stored_names = {WRAPPERS.sub("", name): name for name in tensors.shapes}
    prefixes = set()
    for name in stored_names:
        for embedding in EMBEDDINGS:
            if f".{name}".endswith(f".{embedding}"):
                prefixes.add(name.removesuffix(embedding))
    if len(prefixes) > 1:
        raise UserError(
            f"{tensors.source} holds {len(prefixes)} models, under {' and '.join(sorted(prefixes))}; save one of "
            "them alone"
        )
    prefix = prefixes.pop() if prefixes else ""
    stored_names = {
        name.removeprefix(prefix): stored
        for name, stored in stored_names.items()
        if name.startswith(prefix)
    }
    shapes = {name: tensors.shapes[stored] for name, stored in stored_names.items()}

    def read(name, start, stop):
        return tensors.slice(stored_names[name], start, stop)

    return Tensors(tensors.source, shapes, read)


def from_fms(tensors: Tensors, config: ModelConfig | None) -> Tensors:
    """Returns fms' Llama under our names; other tensors as they are. config: of the model, for the order of its heads;
    None where only names and shapes are wanted."""
    if not FMS_EMBEDDINGS & tensors.shapes.keys():
        return tensors
    parts: dict[str, list[tuple[int, str]]] = {}  # of each of ours: (place among them, name)
    for name in tensors.shapes:
        place, ours = _our_place(name)
        parts.setdefault(ours, []).append((place, name))
    names = {ours: [name for _, name in sorted(found)] for ours, found in parts.items()}
    shapes = {}
    for ours, theirs in names.items():
        rows = sum(tensors.shapes[name][0] for name in theirs)
        shapes[ours] = (rows, *tensors.shapes[theirs[0]][1:])

    def read(ours, start, stop):
        rows = torch.cat([tensors.get(name) for name in names[ours]])
        if names[ours][0].endswith("wg1_fused.weight"):
            gate, up = rows.chunk(2)
            rows = torch.cat([up, gate])
        if ours.endswith("mixer.in_proj.weight") and config:
            rows = _with_halves_rotated(rows, config)
        return rows.reshape(-1)[start:stop]

    return Tensors(tensors.source, shapes, read)


def _with_halves_rotated(rows, config):
    """fms rotates neighbouring rows of a head by position, we the first half with the second."""
    size = config.resolved_head_dim
    value_rows = size * config.n_kv_head
    query_and_key = rows[:-value_rows]
    halves = query_and_key.view(-1, size // 2, 2, rows.shape[1]).transpose(1, 2)
    return torch.cat([halves.reshape(query_and_key.shape), rows[-value_rows:]])


def _our_place(name):
    """Returns (its place among the parts of ours that it is one of, our name)."""
    match = re.fullmatch(r"(?:base_model\.)?(layers\.\d+)\.(.+)\.weight", name)
    if match and match[2] in FMS_LAYER:
        return FMS_ORDER.index(match[2]), f"backbone.{match[1]}.{FMS_LAYER[match[2]]}.weight"
    return 0, FMS_TOP.get(name, name)
