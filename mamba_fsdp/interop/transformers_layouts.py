"""The layouts of transformers: its classes of Mamba, Mamba-2, Falcon-Mamba, Llama, Bamba, Granite 4 H, Falcon-H1,
Nemotron-H.

layouts.yaml says which layers each can hold, how its config.json and our ModelConfig translate, and of which of its
tensors, one below the other, each of ours consists. What no table can say is here.

transformers before 5 normalises Mamba-2's output over all channels, the reference and we over each group: there a model
with ngroups > 1 loads, but computes something else. Its Nemotron-H holds dt above time_step_min, which NVIDIA's own code
uses for initial values alone, as we do: written as 0.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.fields import TABLES, Fields, model_config, pattern, write_fields
from mamba_fsdp.model.spec import MIXER_NAMES, ORIGINAL, ROPE_SCALINGS, multipliers_of, parameters
from mamba_fsdp.settings.model_config import Layer, ModelConfig

MIXTURE = "mixtures of experts, of which this program has neither the router nor the experts"
INDICES = "attn_layer_indices"
LETTERS = "hybrid_override_pattern"
Part = tuple[str, tuple[int, ...]]  # name and shape of one of their tensors


class Layout(SimpleNamespace):
    """One architecture of transformers; layouts.yaml describes its attributes."""

    def fits(self, config: ModelConfig) -> bool:
        """Whether the layout can hold this model: what it would write says the same when it is read."""
        if not all([layer.mixer, layer.mlp] in self.layers for layer in config.layer_list()):
            return False
        written = Fields(Path(self.architecture), self.write_config(config))
        try:
            return self.read_config(written).structure() == config.structure()
        except UserError:
            return False

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """Returns the fields of config.json that say what the model computes, all of them: defaults differ."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **write_fields(config, self.settings, self.fixed),
            "vocab_size": config.padded_vocab_size,
            **self.written,
            **self.write_layers(config),
            **self.write_rotary(config),
            **self.write_multipliers(config),
        }

    def read_config(self, fields: Fields) -> ModelConfig:
        """Returns what a config.json says. Raises UserError that names what can't be represented."""
        values = fields.pop_settings(self.settings) | self.ours
        fields.expect(self.fixed)
        fields.expect_no_limit("time_step_limit")
        self.read_layers(fields, values)
        if "headdim" in values or "d_inner" in values:
            self.read_width(fields, values)
        if "n_head" in values:
            self.read_attention(fields, values)
        values["multipliers"] = self.read_multipliers(fields, ModelConfig(**values))
        fields.ignore(*TABLES["any"]["ignored"], *self.ignored)
        fields.finish()
        return model_config(fields.path, **values, pad_vocab_size_multiple=1)

    def write_layers(self, config: ModelConfig) -> dict[str, Any]:
        mixers = [layer.mixer for layer in config.layer_list()]
        if not self.told_by:
            return {}
        if self.told_by == INDICES:
            return {INDICES: [i for i, mixer in enumerate(mixers) if mixer == "attention"]}
        told: Any = [self.words[mixer] for mixer in mixers]
        if self.told_by == LETTERS:
            told = "".join(told)
        return {self.told_by: told}

    def read_layers(self, fields: Fields, values: dict[str, Any]) -> None:
        """Adds the layers."""
        mixer, has_mlp = self.layers[0]
        mixers = [mixer] * (values["n_layer"] or 0)
        if self.told_by == INDICES:
            for index in fields.pop(INDICES, [], kind=list):
                mixers[index] = "attention"
        elif self.told_by:
            mixers = _pop_mixers(fields)
        if values["n_layer"] not in (None, len(mixers)):
            fields.refuse("num_hidden_layers", f"is {values['n_layer']}, with {len(mixers)} layers")
        values["n_layer"] = len(mixers)
        values["layers"] = pattern([Layer(mixer, has_mlp) for mixer in mixers])

    def read_width(self, fields: Fields, values: dict[str, Any]) -> None:
        """Adds what the inner width of SSM layers and their heads come to."""
        heads = values.pop("n_ssm_head", None)
        usual = values.get("expand", 2) * values["d_model"]
        d_inner = values.pop("d_inner", None) or usual
        if heads:
            headdim = values["headdim"] or d_inner // heads
            if "expand" not in values:
                d_inner = heads * headdim
            if heads * headdim != d_inner:
                said = f"are {heads}, with {headdim} channels each where the layer has {d_inner}"
                fields.refuse("SSM heads", said)
            values["headdim"] = headdim
        if d_inner != usual and not self.free_width:
            fields.refuse("intermediate_size", f"is {d_inner} and not expand * hidden_size")
        if d_inner % values["d_model"]:
            values["d_ssm"] = d_inner
        else:
            values["expand"] = d_inner // values["d_model"]

    def write_rotary(self, config: ModelConfig) -> dict[str, Any]:
        if self.rotated is None:
            return {}
        share = self.rotated
        if config.has("attention"):
            share = config.resolved_rotary_dim / config.resolved_head_dim
        fields: dict[str, Any] = {"rope_theta": config.rope_theta}
        if self.rotated != 1:
            fields["partial_rotary_factor"] = share
        kind, numbers = config.rope
        scaling: dict[str, Any] = {"rope_type": kind or "default", **numbers}
        length: dict[str, int] = {}
        if kind in ("dynamic", "yarn"):  # transformers 4 computes with this one alone
            length = {"max_position_embeddings": int(scaling.pop(ORIGINAL))}
        rope = {"rope_parameters": {**fields, **scaling}, **length}
        if kind:  # for transformers 4, as what stands outside
            rope["rope_scaling"] = scaling
        fields |= rope
        if self.rotates_if:
            fields[self.rotates_if] = "rope" if share else "nope"
        return fields

    def read_attention(self, fields: Fields, values: dict[str, Any]) -> None:
        values["n_kv_head"] = values["n_kv_head"] or values["n_head"]
        values["head_dim"] = values["head_dim"] or values["d_model"] // values["n_head"]
        if self.rotated is None:
            return
        values["rope_theta"], share, values["rope_scaling"] = _pop_rotary(fields, self.rotated)
        if self.rotates_if and fields.content.pop(self.rotates_if, None) != "rope":
            share = 0.0
        rotated = int(values["head_dim"] * share)
        values["rotary_dim"] = rotated
        if rotated % 2 and "attention" in values["layers"]:
            fields.refuse(
                "partial_rotary_factor",
                f"{share} rotates {rotated} of {values['head_dim']} channels, an odd number",
            )

    def write_multipliers(self, config: ModelConfig) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for theirs, names in self.multipliers.items():
            numbers = [config.multiplier(name) * _unit(theirs, config) for name in names]
            fields[theirs] = numbers if len(names) > 1 else numbers[0]
        return fields

    def read_multipliers(self, fields: Fields, config: ModelConfig) -> str:
        """Returns the setting `multipliers`: those that the model reads and that are not the usual ones."""
        known = multipliers_of(config)
        items = []
        for theirs, names in self.multipliers.items():
            if len(names) == 1:
                numbers = [fields.pop(theirs, 1.0, kind=float)]
            else:
                numbers = fields.pop(theirs, [1.0] * len(names), kind=list)
            if len(numbers) != len(names):
                fields.refuse(theirs, f"has {len(numbers)} numbers, not {len(names)}")
            for name, number in zip(names, numbers):
                multiplier = number / _unit(theirs, config)
                if name in known and multiplier != 1:
                    items.append(f"{name}={multiplier}")
        return ",".join(items)

    def parts(self, config: ModelConfig) -> dict[str, list[Part]]:
        """Returns {our name: their tensors}: ours is theirs one below the other."""
        kinds = [dict(zip(MIXER_NAMES, layer.mixers)) for layer in config.layer_list()]
        result = {}
        for name, parameter in parameters(config).items():
            if name in self.top:
                result[name] = [(self.top[name], parameter.shape)]
                continue
            index, part, rest = name.removeprefix("backbone.layers.").split(".", 2)
            kind = kinds[int(index)].get(part, part)
            usual = f"{part}.{rest}".replace("mixer", self.mamba, 1)
            theirs = self.tensors.get(f"{kind}.{rest}", [usual])
            shares = [1] * len(theirs)
            if len(theirs) == 3:  # query, key, value
                shares = [config.n_head, config.n_kv_head, config.n_kv_head]
            rows, *columns = parameter.shape
            result[name] = []
            for there, share in zip(theirs, shares):
                shape = (rows * share // sum(shares), *columns)
                result[name].append((f"{self.layer_prefix}{index}.{there}", shape))
        return result


class FalconH1(Layout):
    def write_config(self, config):
        return {
            **super().write_config(config),
            "mamba_rms_norm": config.ssm_norm != "none",
            "mamba_norm_before_gate": config.ssm_norm == "before",
        }

    def read_layers(self, fields, values):
        super().read_layers(fields, values)
        norm_first = fields.pop("mamba_norm_before_gate", True, kind=bool)
        values["ssm_norm"] = "before" if norm_first else "after"
        if not fields.pop("mamba_rms_norm", False, kind=bool):
            values["ssm_norm"] = "none"


ORDER = "Mamba FalconMamba Mamba2 Llama Bamba Granite NemotronH"  # Bamba can hold most of what Llama holds
LAYOUTS = [Layout(**TABLES[name]) for name in ORDER.split()] + [FalconH1(**TABLES["FalconH1"])]


def layout_for(config: ModelConfig) -> Layout:
    """Returns the layout that holds a model. Raises UserError where transformers has none."""
    for layout in LAYOUTS:
        if layout.fits(config):
            return layout
    known = ", ".join(f"{layout.architecture} ({layout.holds})" for layout in LAYOUTS)
    raise UserError(f"transformers has no model with layers={config.layers}; it has {known}")


def layout_of(fields: Fields) -> Layout:
    """Returns the layout that a config.json names. Raises UserError for any other model."""
    model_type = fields.content.get("model_type")
    architectures = fields.pop("architectures", [], kind=list)
    for layout in LAYOUTS:
        named = not architectures or layout.architecture in architectures
        if model_type == layout.model_type and named:
            return layout
    readable = ", ".join(layout.architecture for layout in LAYOUTS)
    raise UserError(
        f"{fields.path}: a model of type {model_type!r}, architectures {architectures}; this program reads {readable}"
    )


def _unit(field: str, config: ModelConfig) -> float:
    """What 1 of ours is in their field: of the scale of attention's scores, the usual one."""
    return config.resolved_head_dim**-0.5 if field == "attention_multiplier" else 1.0


def _pop_mixers(fields: Fields) -> list[str]:
    """Returns the mixer of each layer, which a text of letters or a list of names tells."""
    mixers: list[str] = []
    for name in (LETTERS, "layers_block_type", "layer_types"):
        words = fields.content.pop(name, None) or ()
        for word in words:
            if word not in TABLES["mixers"]:
                known = MIXTURE if word in ("E", "moe") else "no layer that this program knows"
                fields.refuse(name, f"has {word!r}, {known}")
        mixers = mixers or [TABLES["mixers"][word] for word in words]
    return mixers


def _pop_rotary(fields: Fields, usual_share: float) -> tuple[float, float, str]:
    """Returns (rope theta, rotated share of each head, rope_scaling), from transformers 4's fields or 5's, which must
    agree."""
    inner = [fields.inner("rope_scaling"), fields.inner("rope_parameters")]

    def agreed(name, default, kind=float):
        all_given = {rope.pop(name, None, kind) for rope in (fields, *inner)}
        given = all_given - {None}
        if len(given) > 1:
            fields.refuse(name, f"is given twice, as {' and '.join(map(str, sorted(given)))}")
        return given.pop() if given else default

    theta = agreed("rope_theta", 10000.0)
    share = agreed("partial_rotary_factor", usual_share)
    kind = agreed("rope_type", agreed("type", "default", str), str)
    if kind != "default" and kind not in ROPE_SCALINGS:
        fields.refuse("rope_type", f"is {kind!r}; this program has {', '.join(ROPE_SCALINGS)}")
    usual = {
        ORIGINAL: fields.content.get("max_position_embeddings"),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    numbers = {name: agreed(name, usual.get(name)) for name in ROPE_SCALINGS.get(kind, ())}
    if kind == "yarn":
        mscale = agreed("mscale", None)
        mscale_all_dim = agreed("mscale_all_dim", None)
        if numbers["factor"] and not numbers["attention_factor"]:
            numbers["attention_factor"] = _attention_factor(
                numbers["factor"], mscale, mscale_all_dim
            )
    items = [f"{name}={float(number)}" for name, number in sorted(numbers.items()) if number]
    for rope in inner:
        rope.expect({"truncate": (True, True)})
        rope.finish()
    return theta, share, "" if kind == "default" else ",".join([kind, *items])


def _attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Returns what YaRN multiplies cosines and sines by where the config does not say it."""

    def scale(weight):
        return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1)
