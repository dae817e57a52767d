"""Reads checkpoints of fms-fsdp, Composer and others: the model among all that a file holds, and fms' Llama under our
names.

fms-fsdp keeps the model under `model_state`, Composer under `state.model` and the name of a field of its own; compiled
and wrapped modules leave words of their own in the names. Everything else in the file is ignored.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from mamba_fsdp.checkpoint.tensors import TensorSource
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.architectures import ARCHITECTURES
from mamba_fsdp.interop.fields import TABLES
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.spec import EMBEDDING

WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
FMS_TOP: dict[str, str] = TABLES["fms"]["top"]
FMS_LAYER: dict[str, str] = TABLES["fms"]["layer"]
FMS_ORDER = list(FMS_LAYER)  # from top to bottom in a tensor of ours
FMS_EMBEDDINGS = {name for name, our_name in FMS_TOP.items() if our_name == EMBEDDING}
EMBEDDINGS = {EMBEDDING, *FMS_EMBEDDINGS, *(kind.top[EMBEDDING] for kind in ARCHITECTURES)}


def stored_names(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns {the name that the model gave a tensor: its name in the file} of the model among all that `path` holds.

    The model is the part with an embedding. Raises UserError if there are two models.
    """
    stored_by_name = {WRAPPERS.sub("", name): name for name in names}
    prefixes = set()
    for name in stored_by_name:
        for embedding in EMBEDDINGS:
            if f".{name}".endswith(f".{embedding}"):
                prefixes.add(name.removesuffix(embedding))
    if len(prefixes) > 1:
        raise UserError(
            f"{path} holds {len(prefixes)} models, under {' and '.join(sorted(prefixes))}; save one of "
            "them alone"
        )
    prefix = prefixes.pop() if prefixes else ""
    return {
        name.removeprefix(prefix): stored
        for name, stored in stored_by_name.items()
        if name.startswith(prefix)
    }


class FmsTensors(TensorSource):
    """fms' Llama under our names."""

    def __init__(self, stored: TensorSource, config: ModelConfig | None):
        """Turns stored names and shapes into ours. config: the model's, which has the order of heads; None if only
        names and shapes are wanted."""
        self.source = stored.source
        self.stored = stored
        self.config = config
        places: dict[str, list[tuple[int, str]]] = {}
        for name in stored.shapes:
            place, our_name = _our_place(name)
            places.setdefault(our_name, []).append((place, name))
        self.names = {}  # {our name: the stored names that make it up, from top to bottom}
        self.shapes = {}
        for our_name, placed in places.items():
            names = [name for _, name in sorted(placed)]
            self.names[our_name] = names
            rows = sum(stored.shapes[name][0] for name in names)
            self.shapes[our_name] = (rows, *stored.shapes[names[0]][1:])

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        names = self.names[name]
        rows = torch.cat([self.stored.get(stored) for stored in names])
        if names[0].endswith("wg1_fused.weight"):
            gate, up = rows.chunk(2)
            rows = torch.cat([up, gate])
        if name.endswith("mixer.in_proj.weight") and self.config:
            rows = _with_halves_rotated(rows, self.config)
        return rows.reshape(-1)[start:stop]


def _with_halves_rotated(rows: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Returns rows [query | key | value] in our order. By position, fms rotates neighbouring rows of a head, and we
    rotate the first half with the second."""
    size = config.resolved_head_dim
    value_rows = size * config.n_kv_head
    query_and_key = rows[:-value_rows]
    halves = query_and_key.view(-1, size // 2, 2, rows.shape[1]).transpose(1, 2)
    return torch.cat([halves.reshape(query_and_key.shape), rows[-value_rows:]])


def _our_place(name: str) -> tuple[int, str]:
    """Returns (the place of its rows in one of our tensors, the name of that tensor)."""
    match = re.fullmatch(r"(?:base_model\.)?(layers\.\d+)\.(.+)\.weight", name)
    if match and match[2] in FMS_LAYER:
        return FMS_ORDER.index(match[2]), f"backbone.{match[1]}.{FMS_LAYER[match[2]]}.weight"
    return 0, FMS_TOP.get(name, name)
