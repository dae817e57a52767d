"""Defines ModelConfig, the settings that describe the structure of a model: widths, sizes and a pattern of layers."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import Condition, condition, describe_type, has_effect, parse_pairs, setting
from mamba_fsdp.model import spec
from mamba_fsdp.text import suggest_name


def layer_with(*mixers: str) -> Condition:
    """Returns the condition under which a setting has an effect: the model has a layer with one of these mixers."""
    description = f"a {' or '.join(mixers)} layer"
    if mixers == ("mlp",):
        description = "a layer with +mlp"
    if mixers == ("attention",):
        description = "an attention layer"
    readers = [spec.MIXERS[name] for name in mixers]

    @condition(description)
    def is_met(model: "ModelConfig") -> bool:
        return any(part in readers for part in model.parts())

    return is_met


ssm_layer = layer_with("mamba1", "mamba2", "mamba3", "gdn")
multihead_ssm_layer = layer_with("mamba2", "mamba3", "gdn")
attention_layer = layer_with("attention")
mlp_layer = layer_with("mlp")


@condition("an attention layer with rotary_dim other than 0")
def rotary_attention_layer(model: "ModelConfig") -> bool:
    return model.has_mixer("attention") and model.rotary_dim != 0


@dataclass(frozen=True)
class Layer:
    """The kind of one layer: its mixer, or two mixers side by side, and an optional MLP after them."""

    mixer: str  # a key of spec.MIXERS, or two keys with / between them
    mlp: bool

    @property
    def mixers(self) -> list[str]:
        return self.mixer.split("/")

    @property
    def name(self) -> str:
        """Returns the layer in the notation of ModelConfig.layers, such as mamba2+mlp."""
        return f"{self.mixer}+mlp" if self.mlp else self.mixer


@dataclass(frozen=True)
class ModelConfig:
    """The structure of a model. A preset gives the fields their values; each field can be overridden."""

    model_name: str = setting("demo")
    """Preset that the other model settings start from: demo, mamba-130m, mamba2-1.3b, mamba_9.8b,
    llama2_7b and more."""
    d_model: int = setting(128, at_least=1)
    """Width of the residual stream (hidden size)."""
    n_layer: int = setting(4, at_least=1, at_most=10_000)
    """Number of layers."""
    layers: str = setting("mamba1")
    """Pattern of layers, repeated or cut to n_layer: items mamba1, mamba2, mamba3, gdn (Gated DeltaNet),
    attention or mlp, or two side by side such as mamba2/attention, each with an optional +mlp and
    count, as in 9*mamba2+mlp,attention+mlp."""
    vocab_size: int = setting(4096, at_least=2)
    """Number of tokens of the tokenizer; the embedding is padded to a multiple of
    pad_vocab_size_multiple."""
    pad_vocab_size_multiple: int = setting(8, at_least=1)
    """Rows of the embedding are rounded up to a multiple of this."""
    tie_embeddings: bool = setting(True)
    """Use the embedding as the output layer too."""
    norm_eps: float = setting(1e-5, above=0)
    """Epsilon of every RMSNorm."""
    d_state: int = setting(16, at_least=1, needs=ssm_layer)
    """State size per channel (Mamba-1) or per head (Mamba-2 and -3); Gated DeltaNet: channels per head
    of queries and keys."""
    d_conv: int = setting(4, at_least=2, at_most=4, needs=layer_with("mamba1", "mamba2", "gdn"))
    """Width of the causal convolution."""
    expand: int = setting(2, at_least=1, needs=ssm_layer)
    """Inner width of an SSM layer as a multiple of d_model."""
    d_ssm: int = setting(0, at_least=0, instead_of="expand", needs=ssm_layer)
    """Inner width of an SSM layer; 0 means expand * d_model."""
    dt_rank: int = setting(0, at_least=0, needs=layer_with("mamba1"))
    """Mamba-1: rank of the dt projection; 0 means ceil(d_model / 16)."""
    bcdt_norm_eps: float = setting(0.0, at_least=0, needs=layer_with("mamba1"))
    """Mamba-1: epsilon of the RMSNorms without weights on B, C and dt, as in Falcon-Mamba; 0 means that B, C
    and dt are not normalized."""
    headdim: int = setting(64, at_least=1, needs=multihead_ssm_layer)
    """Mamba-2 and -3: channels per head; Gated DeltaNet: channels per head of values."""
    ngroups: int = setting(1, at_least=1, needs=multihead_ssm_layer)
    """Mamba-2 and -3: groups of heads that share B and C; Gated DeltaNet: number of heads of queries and keys."""
    chunk_size: int = setting(256, at_least=1, needs=layer_with("mamba2", "mamba3"))
    """Mamba-2 and -3: positions per chunk of the fused scan (the result does not depend on it)."""
    decay_activation: str = setting(
        "heavy_tail", choices=("heavy_tail", "softplus"), needs=layer_with("mamba3")
    )
    """Mamba-3: function that makes A positive. heavy_tail: 1 + x or 1 / (1 - x), as in mamba-ssm since
    June 2026 and in the published weights; softplus: as in mamba-ssm before."""
    ssm_norm: str = setting(
        "after", choices=("after", "before", "none"), needs=layer_with("mamba2")
    )
    """Mamba-2: whether the RMSNorm of the output comes after the gate, before it, or is left out."""
    allow_neg_eigval: bool = setting(False, needs=layer_with("gdn"))
    """Gated DeltaNet: beta is between 0 and 2 instead of 0 and 1, so that a state can change its sign (negative
    eigenvalues)."""
    gdn_norm_eps: float = setting(0.0, at_least=0, needs=layer_with("gdn"))
    """Gated DeltaNet: epsilon of the RMSNorm of the output; 0 means norm_eps."""
    n_head: int = setting(8, at_least=1, needs=attention_layer)
    """Attention: query heads."""
    n_kv_head: int = setting(8, at_least=1, needs=attention_layer)
    """Attention: key and value heads (fewer than n_head: grouped-query attention)."""
    attention_gate: bool = setting(False, needs=attention_layer)
    """Attention: the output is multiplied by the sigmoid of a gate per channel, as in Qwen3.5."""
    qk_norm: str = setting("none", choices=("none", "head", "whole"), needs=attention_layer)
    """Attention: an RMSNorm of the queries and of the keys. head: over the channels of each head; whole: over the
    channels of all heads."""
    norm_position: str = setting(
        "before", choices=("before", "after_attention"), needs=attention_layer
    )
    """Position of the norms in a layer. before: on the inputs of the mixer and of the MLP; after_attention: in
    attention layers on their outputs, as in Olmo Hybrid."""
    head_dim: int = setting(0, at_least=0, needs=attention_layer)
    """Attention: channels per head; 0 means d_model / n_head."""
    rotary_dim: int = setting(-1, at_least=-1, needs=attention_layer)
    """Attention: number of channels of each head, from the first, that are rotated by position. 0: none.
    -1: all, or all but the last if the number is odd."""
    rope_theta: float = setting(10000.0, above=0, needs=rotary_attention_layer)
    """Attention: base of the rotary frequencies."""
    rope_scaling: str = setting("", needs=rotary_attention_layer)
    """Attention: slower rotation for longer texts, as in transformers: linear, dynamic, llama3 or yarn with its
    numbers, as in linear,factor=2 or
    llama3,factor=8,low_freq_factor=1,high_freq_factor=4,original_max_position_embeddings=8192."""
    d_intermediate: int = setting(0, at_least=0, needs=mlp_layer)
    """Width of the MLP in layers with mlp or +mlp; 0 means 8/3 of d_model, rounded up to a multiple of
    128."""
    mlp_activation: str = setting("swiglu", choices=("swiglu", "relu2"), needs=mlp_layer)
    """MLP: SwiGLU, with a gate, or squared ReLU, without a gate."""
    multipliers: str = setting("")
    """Constant factors, as in embedding=12,residual=0.22,logits=0.125. embedding and logits multiply the
    embedding and the logits; residual multiplies each layer's output before it is added to the residual stream;
    ssm_in, attention_in and mlp_in multiply the input of that part of a layer; ssm_out, attention_out and mlp_out
    multiply its output; attention_q, attention_k, attention_v, mlp_gate, ssm_z, ssm_x, ssm_B, ssm_C and ssm_dt
    multiply the outputs of its first projection."""

    def layer_list(self) -> list[Layer]:
        """Returns the n_layer layers of the model. Raises UserError if `layers` is not a valid pattern."""
        pattern: list[Layer] = []
        for item in self.layers.replace(" ", "").split(","):
            match = re.fullmatch(r"(?:(\d{1,9})\*)?([a-z0-9]+(?:/[a-z0-9]+)?)(\+mlp)?", item)
            if not match or not spec.MIXERS.keys() >= set(match[2].split("/")):
                name = re.split("[*/+]", item)[-1]
                hint = suggest_name(name, spec.MIXERS, "no layer", elsewhere={"attn": "attention"})
                raise UserError(
                    f"layers: can't read {item!r} in {self.layers!r} ({hint}); write {', '.join(spec.MIXERS)}, or two "
                    "with / between them, each with an optional count and +mlp, as in 9*mamba2+mlp,attention+mlp"
                )
            count = min(int(match[1] or 1), self.n_layer)
            pattern += [Layer(mixer=match[2], mlp=match[3] is not None)] * count
        if not pattern:
            raise UserError(
                f"layers: {self.layers!r} contains no layer; each count must be at least 1"
            )
        return [pattern[index % len(pattern)] for index in range(self.n_layer)]

    def has_mixer(self, mixer: str) -> bool:
        """Returns whether any layer has this mixer."""
        return any(mixer in layer.mixers for layer in self.layer_list())

    def multiplier(self, name: str) -> float:
        """Returns the factor `name` of `multipliers`; 1 if it is not given."""
        return parse_pairs("multipliers", self.multipliers).get(name, 1.0)

    @property
    def rope(self) -> tuple[str, dict[str, float]]:
        """Returns the kind and {parameter: value} of rope_scaling; the kind is "" without scaling."""
        kind, _, pairs = self.rope_scaling.partition(",")
        return kind, parse_pairs("rope_scaling", pairs)

    @property
    def padded_vocab_size(self) -> int:
        return round_up(self.vocab_size, self.pad_vocab_size_multiple)

    @property
    def d_inner(self) -> int:
        return self.d_ssm or self.expand * self.d_model

    @property
    def resolved_dt_rank(self) -> int:
        return self.dt_rank or -(-self.d_model // 16)

    @property
    def n_ssm_head(self) -> int:
        return self.d_inner // self.headdim

    @property
    def resolved_gdn_norm_eps(self) -> float:
        return self.gdn_norm_eps or self.norm_eps

    @property
    def resolved_head_dim(self) -> int:
        return self.head_dim or self.d_model // self.n_head

    @property
    def resolved_rotary_dim(self) -> int:
        return self.resolved_head_dim // 2 * 2 if self.rotary_dim < 0 else self.rotary_dim

    @property
    def resolved_d_intermediate(self) -> int:
        """Returns the width of the MLP, by default as in mamba_ssm's GatedMLP; 0 for a model without an MLP."""
        if spec.MLP not in self.parts():
            return 0
        return self.d_intermediate or round_up(8 * self.d_model // 3, 128)

    def structure(self) -> dict[str, object]:
        """Returns {setting: its resolved value} for the settings that have an effect.

        Two configs that describe the same model have the same structure, even if one of them relies on a default that
        the other one spells out."""
        values = {
            **vars(self),
            "model_name": "",
            "chunk_size": 0,
            "layers": self.layer_list(),
            "vocab_size": self.padded_vocab_size,
            "pad_vocab_size_multiple": self.padded_vocab_size,
            "expand": self.d_inner / self.d_model,
            "d_ssm": self.d_inner,
            "dt_rank": self.resolved_dt_rank,
            "gdn_norm_eps": self.resolved_gdn_norm_eps,
            "head_dim": self.resolved_head_dim,
            "rotary_dim": self.resolved_rotary_dim,
            "d_intermediate": self.resolved_d_intermediate,
            "rope_scaling": self.rope,
            "multipliers": parse_pairs("multipliers", self.multipliers),
        }
        return {name: value for name, value in values.items() if has_effect(FIELDS[name], self)}

    def parts(self) -> list[spec.Spec]:
        """Returns each kind of mixer in the model once, and the MLP if the model has one."""
        parts: dict[spec.Spec, None] = {}
        for layer in self.layer_list():
            parts |= dict.fromkeys(spec.layer_parts(layer).values())
        return list(parts)

    def applicable_multipliers(self) -> str:
        """Returns `multipliers` without the factors for parts that this model does not have."""
        names = spec.multiplier_names(self)
        items = self.multipliers.split(",")
        return ",".join(item for item in items if item.partition("=")[0].strip() in names)

    def check(self) -> None:
        """Raises UserError if no model with these settings can be built. The message names the settings."""
        for part in self.parts():
            part.check(self)
        multipliers = spec.multiplier_names(self)
        for name in parse_pairs("multipliers", self.multipliers):
            if name not in multipliers:
                hint = suggest_name(name, multipliers, f"it has {', '.join(multipliers)}")
                raise UserError(f"multipliers: this model has no multiplier {name!r}; {hint}")


FIELDS = {leaf.name: leaf for leaf in dataclasses.fields(ModelConfig)}


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


def parse_model_config(path: Path, values: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig with the `values` that were read from the file `path`.

    Missing settings take their defaults. Raises UserError for an unknown name, a wrong type, a value out of bounds, or
    a model that can't be built."""
    for name, value in values.items():
        if name not in FIELDS:
            raise UserError(
                f"{path}: {name} is not a model setting of mamba_fsdp; remove this line"
            )
        leaf = FIELDS[name]
        try:
            if type(value) is not leaf.type:
                raise ValueError(f"expected {describe_type(leaf)}")
            leaf.metadata["bounds"].check(value)
        except ValueError as error:
            raise UserError(f"{path}: {name} is {value!r}, but {error}") from None
    config = ModelConfig(**values)
    try:
        config.check()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return config
