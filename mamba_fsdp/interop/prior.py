"""Checkpoints of other trainers: the model's tensors among all that a file holds, and those of fms' Llama as ours.

fms-fsdp keeps the model under `model_state`, Composer under `state.model` and the name of a field of its own; compiled
and wrapped modules leave words of their own in the names. What a file holds beside the model is passed over.
"""

import re

import torch

from config.model_config import ModelConfig
from config.presets import PRESETS, preset
from mamba_fsdp.checkpoint.tensors import Tensors
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.fields import TABLES
from mamba_fsdp.interop.transformers_forms import FORMS
from mamba_fsdp.model.spec import EMBEDDING, LM_HEAD, parameters

WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
FMS = TABLES["fms"]
EMBEDDINGS = {
    EMBEDDING,
    "shared.emb.weight",
    "base_model.embedding.weight",
    *(form.top[EMBEDDING] for form in FORMS),
}


def models_tensors(tensors: Tensors) -> Tensors:
    """The model's among `tensors`, under the names that the model gave them: where its embedding is, the rest is.
    Raises UserError where there are two models."""
    plain = {WRAPPERS.sub("", name): name for name in tensors.shapes}
    found = {
        name[: -len(end)] for end in EMBEDDINGS for name in plain if f".{name}".endswith(f".{end}")
    }
    if len(found) > 1:
        raise UserError(
            f"{tensors.source} holds {len(found)} models, under {' and '.join(sorted(found))}; save one of "
            "them alone"
        )
    prefix = found.pop() if found else ""
    own = {
        name.removeprefix(prefix): there for name, there in plain.items() if name.startswith(prefix)
    }
    return Tensors(
        tensors.source,
        {name: tensors.shapes[there] for name, there in own.items()},
        {},
        lambda name, start, stop: tensors.slice(own[name], start, stop),
    )


def from_fms(tensors: Tensors, config: ModelConfig | None) -> Tensors:
    """fms' Llama under our names; other tensors as they are. config: whose heads are to be brought into our order;
    None where only names and shapes are wanted.

    fms rotates neighbouring rows of a head by position, we the first half with the second.
    """
    if not {"shared.emb.weight", "base_model.embedding.weight"} & tensors.shapes.keys():
        return tensors
    groups = dict[str, list[str]]()
    for name in sorted(tensors.shapes, key=lambda name: _ours(name)[1]):
        groups.setdefault(_ours(name)[0], []).append(name)
    shapes = {
        name: (sum(tensors.shapes[part][0] for part in parts), *tensors.shapes[parts[0]][1:])
        for name, parts in groups.items()
    }

    def read(name, start, stop):
        rows = torch.cat([tensors.get(part) for part in groups[name]])
        if groups[name][0].endswith("wg1_fused.weight"):
            rows = torch.cat(rows.chunk(2)[::-1])
        if name.endswith("mixer.in_proj.weight") and config:
            size = config.resolved_head_dim
            rotated, rest = rows.split(
                [size * (config.n_head + config.n_kv_head), size * config.n_kv_head]
            )
            rotated = (
                rotated.view(-1, size // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rotated.shape)
            )
            rows = torch.cat([rotated, rest])
        return rows.reshape(-1)[start:stop]

    return Tensors(tensors.source, shapes, {}, read)


def _ours(name):
    """(our name of what one of fms' tensors is a part of, its place there)."""
    match = re.fullmatch(r"(?:base_model\.)?layers\.(\d+)\.(.+)\.weight", name)
    if match and match[2] in FMS["layer"]:
        return f"backbone.layers.{match[1]}.{FMS['layer'][match[2]]}.weight", list(
            FMS["layer"]
        ).index(match[2])
    stem = name.removesuffix(".weight")
    return f"{FMS['top'][stem]}.weight" if stem in FMS["top"] else name, 0


def guess(tensors: Tensors) -> ModelConfig | None:
    """The preset that has just these tensors, by our names and shapes."""
    for preset_name in PRESETS:
        config = ModelConfig(**preset(preset_name))
        shapes = {name: parameter.shape for name, parameter in parameters(config).items()}
        tied = {LM_HEAD: shapes[EMBEDDING]} if config.tie_embeddings else {}
        if tensors.shapes in (shapes, shapes | tied):
            return config
    return None
