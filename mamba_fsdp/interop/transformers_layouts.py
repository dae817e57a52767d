"""The layouts of transformers: MambaForCausalLM, Mamba2ForCausalLM, BambaForCausalLM, LlamaForCausalLM.

layouts.yaml says which layers each can hold, how its config.json and our ModelConfig translate, and of which of its
tensors, one below the other, each of ours consists. A class here adds what no table can say.

transformers before 5 normalises Mamba-2's output over all channels, the reference and we over each group: there a model
with ngroups > 1 loads, but computes something else.
"""

from dataclasses import dataclass
from typing import Any

from config.model_config import Layer, ModelConfig
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.fields import TABLES, Fields, Table, model_config, pattern, write_fields
from mamba_fsdp.model.spec import parameters

Part = tuple[str, tuple[int, ...]]  # name and shape of one of their tensors


@dataclass(frozen=True)
class Layout:
    """One architecture of transformers; the fields are those of layouts.yaml, which describes them."""

    architecture: str
    model_type: str
    holds: str
    layers: list[list]
    settings: Table
    fixed: Table
    ignored: list[str]
    top: dict[str, str]
    layer_prefix: str
    tensors: dict[str, list[str]]
    mamba: str

    def fits(self, config: ModelConfig) -> bool:
        """Whether the layout can hold this model."""
        return all([layer.mixer, layer.mlp] in self.layers for layer in config.layer_list())

    def more_fields(self, config: ModelConfig) -> dict[str, Any]:
        """Returns the fields of config.json that are in no table."""
        raise NotImplementedError

    def read_more(self, fields: Fields, values: dict[str, Any]) -> None:
        """Adds to `values`, the settings that the tables gave, those that follow from such fields."""
        raise NotImplementedError

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """Returns the fields of config.json that say what the model computes, all of them: defaults differ."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **write_fields(config, self.settings, self.fixed),
            "vocab_size": config.padded_vocab_size,
            **self.more_fields(config),
        }

    def read_config(self, fields: Fields) -> ModelConfig:
        """Returns what a config.json says. Raises UserError that names what can't be represented."""
        values = fields.pop_settings(self.settings)
        fields.expect(self.fixed)
        self.read_more(fields, values)
        fields.ignore(*TABLES["any"]["ignored"], *self.ignored)
        fields.finish()
        return model_config(fields.path, **values, pad_vocab_size_multiple=1)

    def parts(self, config: ModelConfig) -> dict[str, list[Part]]:
        """Returns {our name: their tensors}: ours is theirs one below the other."""
        layers = config.layer_list()
        result = {}
        for name, parameter in parameters(config).items():
            if name in self.top:
                result[name] = [(self.top[name], parameter.shape)]
                continue
            index, ours = name.removeprefix("backbone.layers.").split(".", 1)
            with_kind = ours.replace("mixer", layers[int(index)].mixer, 1)
            theirs = self.tensors.get(with_kind, [ours.replace("mixer", self.mamba, 1)])
            shares = [1] * len(theirs)
            if len(theirs) == 3:  # query, key, value
                shares = [config.n_head, config.n_kv_head, config.n_kv_head]
            rows, *columns = parameter.shape
            result[name] = []
            for there, share in zip(theirs, shares):
                shape = (rows * share // sum(shares), *columns)
                result[name].append((f"{self.layer_prefix}{index}.{there}", shape))
        return result


class Mamba(Layout):
    def more_fields(self, config):
        return {
            "residual_in_fp32": True,
            "time_step_rank": config.resolved_dt_rank,
            "intermediate_size": config.d_inner,
        }

    def read_more(self, fields, values):
        d_inner = values["expand"] * values["d_model"]
        fields.expect({"intermediate_size": (d_inner, d_inner, "and not expand * hidden_size")})
        values["layers"] = "mamba1"
        values["dt_rank"] = fields.pop("time_step_rank", 0)


class Mamba2(Layout):
    def more_fields(self, config):
        return {
            "residual_in_fp32": True,
            "time_step_rank": config.resolved_dt_rank,
            "num_heads": config.n_ssm_head,
        }

    def read_more(self, fields, values):
        heads = values["expand"] * values["d_model"] // values["headdim"]
        fields.expect({"num_heads": (heads, 128, "and not expand * hidden_size / head_dim")})
        fields.expect_no_limit("time_step_limit")
        values["layers"] = "mamba2"


class Llama(Layout):
    def fits(self, config):
        whole_heads = config.resolved_rotary_dim == config.resolved_head_dim
        return super().fits(config) and whole_heads and config.d_model % config.n_head == 0

    def more_fields(self, config):
        rope = {"rope_theta": config.rope_theta}
        return {**rope, "rope_parameters": {"rope_type": "default", **rope}}

    def read_more(self, fields, values):
        values["layers"] = "attention+mlp"
        rope_theta, rotated = _pop_rotary(fields, usual_share=1.0)
        _add_attention(fields, values, rope_theta, rotated)


class Bamba(Layout):
    def fits(self, config):
        return super().fits(config) and config.n_ssm_head * config.headdim == config.d_inner

    def more_fields(self, config):
        share = 0.5
        if config.has("attention"):
            share = config.resolved_rotary_dim / config.resolved_head_dim
        rope = {"rope_theta": config.rope_theta, "partial_rotary_factor": share}
        layers = enumerate(config.layer_list())
        return {
            **rope,  # for transformers 4
            "rope_parameters": {"rope_type": "default", **rope},
            "attn_layer_indices": [index for index, layer in layers if layer.mixer == "attention"],
            "mamba_n_heads": config.n_ssm_head,
            "mamba_d_head": config.headdim,
        }

    def read_more(self, fields, values):
        attention = fields.pop("attn_layer_indices", [], kind=list)
        layers = []
        for index in range(values["n_layer"]):
            layers.append(Layer("attention" if index in attention else "mamba2", mlp=True))
        d_inner = values["expand"] * values["d_model"]
        heads = fields.pop("mamba_n_heads", 128)
        headdim = fields.content.pop("mamba_d_head", "auto")
        if d_inner % heads or headdim not in ("auto", d_inner // heads):
            fields.refuse("mamba_d_head", f"is {headdim} with {heads} heads and {d_inner} channels")
        fields.expect_no_limit("time_step_limit")
        values["layers"] = pattern(layers)
        values["headdim"] = d_inner // heads
        rope_theta, rotated = _pop_rotary(fields, usual_share=0.5)
        if attention:
            _add_attention(fields, values, rope_theta, rotated)
        else:
            for name in ("n_head", "n_kv_head", "head_dim"):
                del values[name]


LAYOUTS = (  # Llama first: Bamba can hold most of what it holds
    Mamba(**TABLES["Mamba"]),
    Mamba2(**TABLES["Mamba2"]),
    Llama(**TABLES["Llama"]),
    Bamba(**TABLES["Bamba"]),
)


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
    architectures = fields.content.get("architectures") or []
    if not isinstance(architectures, list) or not all(
        isinstance(name, str) for name in architectures
    ):
        fields.refuse("architectures", "is no list of names")
    for layout in LAYOUTS:
        named = not architectures or layout.architecture in architectures
        if model_type == layout.model_type and named:
            return layout
    kind = f"type {model_type!r} ({', '.join(architectures) or 'no architecture'})"
    readable = ", ".join(layout.architecture for layout in LAYOUTS)
    raise UserError(f"{fields.path}: a model of {kind}; this program reads {readable}")


def _pop_rotary(fields: Fields, usual_share: float) -> tuple[float, float]:
    """Returns (rope theta, rotated share of each head), from transformers 4's fields or 5's, which must agree; refuses
    scaled ones."""
    unscaled = ("default", "default", "scaled rotary embeddings")
    inner = [fields.inner("rope_scaling"), fields.inner("rope_parameters")]
    for rope in inner:
        rope.expect({"rope_type": unscaled, "type": unscaled})
    values = []
    for name, default in (("rope_theta", 10000.0), ("partial_rotary_factor", usual_share)):
        given = {rope.pop(name, kind=float) for rope in (fields, *inner) if name in rope.content}
        if len(given) > 1:
            fields.refuse(name, f"is given twice, as {' and '.join(map(str, sorted(given)))}")
        values.append(given.pop() if given else default)
    for rope in inner:
        rope.finish()
    return values[0], values[1]


def _add_attention(fields, values, rope_theta, rotated_share):
    values["n_kv_head"] = values["n_kv_head"] or values["n_head"]
    values["head_dim"] = values["head_dim"] or values["d_model"] // values["n_head"]
    values["rope_theta"] = rope_theta
    values["rotary_dim"] = int(values["head_dim"] * rotated_share)
    if values["rotary_dim"] % 2:
        fields.refuse(
            "partial_rotary_factor",
            f"{rotated_share} rotates {values['rotary_dim']} of {values['head_dim']} channels, an odd number",
        )
