"""Reads checkpoints of fms-fsdp, Composer and other trainers: finds the model in a file, and translates the tensor names of
the Llama in fms.

fms-fsdp stores the model under `model_state`, and Composer under `state.model` and the name of an attribute. The names of
compiled and wrapped modules contain additional parts, such as `_orig_mod`. Everything else in the file is ignored.
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
FMS_ORDER = list(FMS_LAYER)  # rows are concatenated to a tensor of this program in this order
FMS_EMBEDDINGS = {name for name, our_name in FMS_TOP.items() if our_name == EMBEDDING}
EMBEDDINGS = {EMBEDDING, *FMS_EMBEDDINGS, *(kind.top[EMBEDDING] for kind in ARCHITECTURES)}


def stored_names(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Finds the model among all tensors of a file. The model is the part that contains an embedding.

    path: the file, for messages. names: the names of all tensors. Returns {name of a tensor in the model: its name in the
    file}. Raises UserError if there are several models.
    """
    stored_by_name = {WRAPPERS.sub("", name): name for name in names}
    prefixes = set()
    for name in stored_by_name:
        for embedding in EMBEDDINGS:
            if f".{name}".endswith(f".{embedding}"):
                prefixes.add(name.removesuffix(embedding))
    if len(prefixes) > 1:
        raise UserError(
            f"{path} contains {len(prefixes)} models, under {' and '.join(sorted(prefixes))}; save only one of "
            "them"
        )
    prefix = prefixes.pop() if prefixes else ""
    return {
        name.removeprefix(prefix): stored
        for name, stored in stored_by_name.items()
        if name.startswith(prefix)
    }


class FmsTensors(TensorSource):
    """The tensors of a Llama from fms, with the names and the layout of this program."""

    def __init__(self, stored: TensorSource, config: ModelConfig | None):
        """Translates names and shapes.

        stored: the tensors in the file. config: the model, which determines the order of rows within heads; None if only the
        names and shapes are needed."""
        self.source = stored.source
        self.stored = stored
        self.config = config
        places: dict[str, list[tuple[int, str]]] = {}
        for name in stored.shapes:
            place, our_name = _our_place(name)
            places.setdefault(our_name, []).append((place, name))
        self.names = {}  # {our name: the stored tensors whose rows are concatenated, in this order}
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
    """Reorders the rows [query | key | value] for rotary positions. fms rotates neighbouring rows of a head together; this
    program rotates row i of the first half together with row i of the second half."""
    size = config.resolved_head_dim
    value_rows = size * config.n_kv_head
    query_and_key = rows[:-value_rows]
    halves = query_and_key.view(-1, size // 2, 2, rows.shape[1]).transpose(1, 2)
    return torch.cat([halves.reshape(query_and_key.shape), rows[-value_rows:]])


def _our_place(name: str) -> tuple[int, str]:
    """Translates the name of a stored tensor. Returns (position of its rows within the tensor of this program, name of that
    tensor)."""
    match = re.fullmatch(r"(?:base_model\.)?(layers\.\d+)\.(.+)\.weight", name)
    if match and match[2] in FMS_LAYER:
        return FMS_ORDER.index(match[2]), f"backbone.{match[1]}.{FMS_LAYER[match[2]]}.weight"
    return 0, FMS_TOP.get(name, name)
