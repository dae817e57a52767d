"""Translates models between this program and the architectures of transformers: Mamba, FalconMamba, Mamba2, Llama, Qwen3,
Olmo2, Bamba, Granite 4 H, Falcon-H1, Nemotron-H, Olmo Hybrid and the text models of Qwen3.5.

For each architecture, translations.yaml lists the supported layers, the mapping between config.json and ModelConfig, and the
stored tensors whose concatenation is a tensor of this program. This module contains the parts that do not fit into tables.

transformers before version 5 normalizes the output of Mamba-2 over all channels; the reference implementation and this program
normalize over each group. In these versions, a model with ngroups > 1 can be loaded but gives other results. The Nemotron-H of
transformers clamps dt to at least time_step_min. NVIDIA's implementation and this program use time_step_min only for
initialization, so exports set it to 0.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, combinations, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.fields import (
    TABLES,
    Fields,
    Table,
    lost_settings,
    model_config,
    pattern,
    write_fields,
)
from mamba_fsdp.interop.silent_attention import with_silent_attention
from mamba_fsdp.model.config import Layer, ModelConfig
from mamba_fsdp.model.spec import (
    MIXER_NAMES,
    MIXERS,
    ORIGINAL_LENGTH,
    ROPE_SCALINGS,
    multiplier_names,
    parameters,
)
from mamba_fsdp.text import format_count

INDICES = "attn_layer_indices"
LETTERS = "hybrid_override_pattern"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the format of another library."""

    name: str
    shape: tuple[int, ...]
    # The elements in this program are the stored elements plus this number.
    shift: float = 0.0


@dataclass(frozen=True)
class Architecture:
    """One architecture of transformers. translations.yaml describes the attributes."""

    class_name: str
    model_type: str
    layers: list[list[Any]]
    needs: list[str]
    settings: Table
    fixed: Table
    ignored: list[str]
    always: Table
    written: Table
    multipliers: Table
    top: Table
    layer_prefix: str
    tensors: Table
    ssm_name: str
    swapped: list[str]
    centred: list[str]
    aliases: Table
    layers_field: str
    mixer_names: Table
    free_width: bool
    chooses_norm: bool
    rotated: float | None
    rotates_if: str

    def knows(self, layer: Layer) -> bool:
        return [layer.mixer, layer.mlp] in self.layers

    def lacks(self, config: ModelConfig) -> list[str]:
        """Returns the reasons why the architecture can't represent the model, as parts of a sentence. The list is empty if the
        architecture can: config.json, written and read again, then describes the same model. The architecture must have the
        layers of the model."""
        absent = [name for name in self.needs if name in MIXERS and not config.has_mixer(name)]
        if absent:
            return [f"without {name}" for name in absent]
        unset = [
            f"{name}={getattr(config, name)}"
            for name in self.needs
            if name not in MIXERS and not getattr(config, name)
        ]
        written = Fields(Path(self.class_name), self.write_config(config))
        try:
            lost = lost_settings(config, self.read_config(written))
        except UserError as error:
            return [f"if {str(error).removeprefix(f'{self.class_name}: ')}"]
        return [f"with {setting}" for setting in (*unset, *lost)]

    def write_config(self, config: ModelConfig) -> Table:
        """Returns the fields of config.json. They include all fields that affect the results of the model, because defaults
        differ between versions of transformers."""
        return {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            **write_fields(config, self.settings, self.fixed),
            "vocab_size": config.padded_vocab_size,
            **self.written,
            **self.write_layers(config),
            **self.write_norm(config),
            **self.write_rotary(config),
            **self.write_multipliers(config),
        }

    def read_config(self, fields: Fields) -> ModelConfig:
        """Reads the model that a config.json describes. Raises UserError for a field that this program can't represent."""
        values = fields.pop_settings(self.settings) | self.always
        fields.expect(self.fixed)
        fields.expect_no_limit("time_step_limit")
        self.read_layers(fields, values)
        if self.chooses_norm:
            values["ssm_norm"] = _pop_norm(fields)
        if "headdim" in values or "d_inner" in values:
            self.read_width(fields, values)
        if "n_head" in values:
            self.read_attention(fields, values)
        values["multipliers"] = self.read_multipliers(fields, ModelConfig(**values))
        fields.ignore(*TABLES["any"]["ignored"], *self.ignored)
        fields.finish()
        return model_config(fields.path, **values, pad_vocab_size_multiple=1)

    def write_layers(self, config: ModelConfig) -> Table:
        mixers = [layer.mixer for layer in config.layer_list()]
        if not self.layers_field:
            return {}
        if self.layers_field == INDICES:
            return {INDICES: [i for i, mixer in enumerate(mixers) if mixer == "attention"]}
        names = [self.mixer_names[mixer] for mixer in mixers]
        if self.layers_field == LETTERS:
            return {LETTERS: "".join(names)}
        return {self.layers_field: names}

    def read_layers(self, fields: Fields, values: Table) -> None:
        """Reads the fields about layers, and adds n_layer and layers to `values`."""
        mixer, has_mlp = self.layers[0]
        mixers = [mixer] * (values["n_layer"] or 0)
        if self.layers_field == INDICES:
            for index in fields.pop_indices(INDICES, len(mixers)):
                mixers[index] = "attention"
        elif self.layers_field:
            own_names = {word: mixer for mixer, word in self.mixer_names.items()}
            mixers = _pop_mixers(fields, TABLES["mixers"] | own_names)
        if values["n_layer"] not in (None, len(mixers)):
            fields.refuse(
                "num_hidden_layers",
                f"is {values['n_layer']}, but the config lists {format_count(len(mixers), 'layer')}",
            )
        values["n_layer"] = len(mixers)
        values["layers"] = pattern([Layer(mixer, has_mlp) for mixer in mixers])

    def write_norm(self, config: ModelConfig) -> Table:
        if not self.chooses_norm:
            return {}
        return {
            "mamba_rms_norm": config.ssm_norm != "none",
            "mamba_norm_before_gate": config.ssm_norm == "before",
        }

    def read_width(self, fields: Fields, values: Table) -> None:
        """Reads the fields about the width of SSM layers, and adds their inner width and head dimension to `values`."""
        heads = values.pop("n_ssm_head", None)
        usual = values.get("expand", 2) * values["d_model"]
        d_inner = values.pop("d_inner", None) or usual
        if heads:
            headdim = values["headdim"] or d_inner // heads
            if "expand" not in values:
                d_inner = heads * headdim
            if heads * headdim != d_inner:
                problem = f"({heads} with {headdim} channels each) do not match the layer's {d_inner} channels"
                fields.refuse("SSM heads", problem)
            values["headdim"] = headdim
        if d_inner != usual and not self.free_width:
            fields.refuse("intermediate_size", f"is {d_inner}, not expand * hidden_size = {usual}")
        if d_inner % values["d_model"]:
            values["d_ssm"] = d_inner
        else:
            values["expand"] = d_inner // values["d_model"]

    def write_rotary(self, config: ModelConfig) -> Table:
        """Returns the fields about rotary position embeddings in config.json, in the formats of transformers 4 and 5."""
        if self.rotated is None:
            return {}
        share = self.rotated
        if config.has_mixer("attention"):
            share = config.resolved_rotary_dim / config.resolved_head_dim
        fields: Table = {"rope_theta": config.rope_theta}
        if self.rotated != 1:
            fields["partial_rotary_factor"] = share
        kind, rope = config.rope
        scaling: Table = {"rope_type": kind or "default", **rope}
        length: Table = {}
        if kind in ("dynamic", "yarn"):  # transformers 4 reads the original length only here
            length = {"max_position_embeddings": int(scaling.pop(ORIGINAL_LENGTH))}
        fields |= {"rope_parameters": {**fields, **scaling}, **length}
        if kind:  # transformers 4 reads rope_theta and the rotated fraction from the top level
            fields["rope_scaling"] = scaling
        if self.rotates_if == "rope_theta" and not share:
            return {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
        if self.rotates_if and self.rotates_if != "rope_theta":
            fields[self.rotates_if] = "rope" if share else "nope"
        return fields

    def read_attention(self, fields: Fields, values: Table) -> None:
        """Reads the fields about attention heads and rotary position embeddings, and adds them to `values`."""
        values["n_kv_head"] = values["n_kv_head"] or values["n_head"]
        values["head_dim"] = values["head_dim"] or values["d_model"] // values["n_head"]
        if self.rotated is None:
            return
        theta, share, values["rope_scaling"] = _pop_rotary(fields, self.rotated)
        values["rope_theta"] = theta or 10000.0
        if self.rotates_if == "rope_theta":
            share = share if theta else 0.0
        elif self.rotates_if and fields.content.pop(self.rotates_if, None) != "rope":
            share = 0.0
        rotated = int(values["head_dim"] * share)
        values["rotary_dim"] = rotated
        if rotated % 2 and "attention" in values["layers"]:
            fields.refuse(
                "partial_rotary_factor",
                f"{share} rotates {rotated} of {values['head_dim']} channels, an odd number",
            )

    def write_multipliers(self, config: ModelConfig) -> Table:
        fields: Table = {}
        for name, our_names in self.multipliers.items():
            unit = _unit(name, config)
            numbers = [config.multiplier(our_name) * unit for our_name in our_names]
            fields[name] = numbers if len(numbers) > 1 else numbers[0]
        return fields

    def read_multipliers(self, fields: Fields, config: ModelConfig) -> str:
        """Reads the multipliers. Returns the setting `multipliers` with those that the model uses and that are not 1."""
        read_by_model = multiplier_names(config)
        items = []
        for name, our_names in self.multipliers.items():
            if len(our_names) == 1:
                numbers = [fields.pop(name, 1.0, kind=float)]
            else:
                numbers = fields.pop(name, [1.0] * len(our_names), kind=list)
            if len(numbers) != len(our_names):
                fields.refuse(name, f"has {len(numbers)} numbers, not {len(our_names)}")
            for our_name, number in zip(our_names, numbers):
                multiplier = number / _unit(name, config)
                if our_name in read_by_model and multiplier != 1:
                    items.append(f"{our_name}={multiplier}")
        return ",".join(items)

    def stored_tensors(self, config: ModelConfig) -> dict[str, list[StoredTensor]]:
        """Returns {name of a parameter in this program: the tensors of transformers whose rows are concatenated to it}."""
        kinds = [dict(zip(MIXER_NAMES, layer.mixers)) for layer in config.layer_list()]
        described = parameters(config)
        result = {}
        for our_name, parameter in described.items():
            if our_name in self.top:
                shift = float(our_name in self.centred)
                result[our_name] = [StoredTensor(self.top[our_name], parameter.shape, shift)]
                continue
            index, module, rest = our_name.removeprefix("backbone.layers.").split(".", 2)
            kind = kinds[int(index)].get(module, module)
            usual = f"{module}.{rest}".replace("mixer", self.ssm_name, 1)
            names: list[str] = self.tensors.get(f"{kind}.{rest}", [usual])
            names = self.tensors.get(f"{kinds[int(index)]['mixer']}:{kind}.{rest}", names)
            size, *columns = parameter.shape
            sizes = [size]
            # Some formats store a parameter as several tensors. For the convolution, the tensors have as many rows as those of
            # the projection, because the channels of the convolution are the first outputs of the projection.
            if len(names) > 1:
                projection = our_name.replace("conv1d", "in_proj")
                sizes = list(described[projection].rows.values())
            result[our_name] = []
            for name, rows in groupby(zip(names, sizes), key=itemgetter(0)):
                shape = (sum(size for _, size in rows), *columns)
                shift = float(f"{kind}.{rest}" in self.centred)
                stored = StoredTensor(f"{self.layer_prefix}{index}.{name}", shape, shift)
                result[our_name].append(stored)
        return result


ARCHITECTURES = [Architecture(**table) for table in TABLES["transformers"].values()]


def architecture_for(config: ModelConfig) -> Architecture:
    """Returns the architecture of transformers that can represent a model. Raises UserError, with the reason, if there is none."""
    layers = list(dict.fromkeys(config.layer_list()))
    reasons = []
    for architecture in architectures_with(layers):
        lacks = architecture.lacks(config)
        if not lacks:
            return architecture
        reasons.append(lacks)
    if reasons:
        why = min(reasons, key=len)[0]
    else:
        sets = chain(combinations(layers, 1), combinations(layers, 2), [layers])
        layers = next(some for some in map(list, sets) if not architectures_with(some))
        why = "together" if len(layers) > 1 else ""
    names = " and ".join(layer.name for layer in layers)
    raise UserError(f"transformers does not have a model with {names} {why}".rstrip())


def architectures_with(layers: Iterable[Layer]) -> list[Architecture]:
    return [each for each in ARCHITECTURES if all(map(each.knows, layers))]


def exportable(config: ModelConfig) -> ModelConfig:
    """Returns the model to export: `config` itself, or an equivalent model with silent attention (see silent_attention.py).
    Raises UserError if transformers supports neither."""
    silent = with_silent_attention(config)
    try:
        architecture_for(silent)
    except UserError:
        architecture_for(config)  # raises an error about the user's model, without silent attention
    return silent


def silent_tensors(architecture: Architecture, config: ModelConfig) -> set[str]:
    """Returns the names of the stored tensors of silent attention (see silent_attention.py). config: the model without it."""
    silent = with_silent_attention(config)
    if not all(map(architecture.knows, silent.layer_list())):
        return set()
    plain = architecture.stored_tensors(config)
    return {
        stored.name
        for our_name, tensors in architecture.stored_tensors(silent).items()
        for stored in tensors
        if our_name not in plain
    }


def architecture_of(fields: Fields) -> Architecture:
    """Returns the architecture of a config.json. Raises UserError if this program does not support it."""
    model_type = fields.content.get("model_type")
    class_names = fields.pop("architectures", [], kind=list)
    for architecture in ARCHITECTURES:
        is_named = not class_names or architecture.class_name in class_names
        if model_type == architecture.model_type and is_named:
            return architecture
    if model_type in TABLES["refused"]:
        fields.refuse("model_type", f"is {model_type!r}, {TABLES['refused'][model_type]}")
    readable = ", ".join(architecture.class_name for architecture in ARCHITECTURES)
    raise UserError(
        f"{fields.path}: models of type {model_type!r} with architectures {class_names} are not supported; this program reads {readable}"
    )


def _unit(name: str, config: ModelConfig) -> float:
    """Returns the value of the field `name` that corresponds to a multiplier of 1. For attention_multiplier, it is the usual
    scale of the attention scores."""
    return config.resolved_head_dim**-0.5 if name == "attention_multiplier" else 1.0


def _pop_mixers(fields: Fields, known: Table) -> list[str]:
    """Reads the mixer of each layer from a string with one letter per layer, or from a list of names."""
    mixers: list[str] = []
    for name in (LETTERS, "layers_block_type", "layer_types"):
        names = fields.content.pop(name, None) or ()
        for word in names:
            if word not in known:
                reason = "not a layer that this program knows"
                if word in ("E", "moe"):
                    reason = "a mixture of experts, which this program does not have"
                fields.refuse(name, f"has {word!r}, {reason}")
        mixers = mixers or [known[word] for word in names]
    return mixers


def _pop_norm(fields: Fields) -> str:
    is_before_gate = fields.pop("mamba_norm_before_gate", True, kind=bool)
    if not fields.pop("mamba_rms_norm", False, kind=bool):
        return "none"
    return "before" if is_before_gate else "after"


def _pop_rotary(fields: Fields, usual_share: float) -> tuple[float | None, float, str]:
    """Reads the fields about rotary position embeddings in the formats of transformers 4 and 5. If both are present, they must
    agree. Returns (theta or None, rotated fraction of each head, the setting rope_scaling)."""
    inner = [fields.inner("rope_scaling"), fields.inner("rope_parameters")]

    def pop_agreed(name: str, default: Any, kind: type = float) -> Any:
        values = {rope.pop(name, None, kind) for rope in (fields, *inner)} - {None}
        if len(values) > 1:
            both = " and ".join(map(str, sorted(values)))
            fields.refuse(name, f"is given twice, as {both}; remove the wrong one")
        return values.pop() if values else default

    theta = pop_agreed("rope_theta", None)
    share = pop_agreed("partial_rotary_factor", usual_share)
    kind = pop_agreed("rope_type", pop_agreed("type", "default", str), str)
    if kind != "default" and kind not in ROPE_SCALINGS:
        fields.refuse("rope_type", f"is {kind!r}; this program supports {', '.join(ROPE_SCALINGS)}")
    usual = {
        ORIGINAL_LENGTH: fields.content.get("max_position_embeddings"),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    numbers = {name: pop_agreed(name, usual.get(name)) for name in ROPE_SCALINGS.get(kind, ())}
    if kind == "yarn":
        mscale = pop_agreed("mscale", None)
        mscale_all_dim = pop_agreed("mscale_all_dim", None)
        if numbers["factor"] and not numbers["attention_factor"]:
            numbers["attention_factor"] = _attention_factor(
                numbers["factor"], mscale, mscale_all_dim
            )
    items = [f"{name}={float(number)}" for name, number in sorted(numbers.items()) if number]
    for rope in inner:
        rope.expect({"truncate": (True, True)})
        rope.ignore("mrope_section", "mrope_interleaved")  # they only affect positions in images
        rope.finish()
    return theta, share, "" if kind == "default" else ",".join([kind, *items])


def _attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Computes the factor for the cosines and sines of YaRN, for a config without attention_factor."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1)
