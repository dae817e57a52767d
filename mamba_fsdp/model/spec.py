"""Describes the parameters and costs of a model's layers, once, for all other code. This file does not need torch.

Initialisation, counting, weight decay, fp32 parameters, the modules and other libraries' formats all follow from it. A
new mixer is an entry in MIXERS here and a class in layers.py; config.py says which settings it reads. `config` is a
ModelConfig.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from mamba_fsdp.errors import UserError
from mamba_fsdp.ops.backends import MIXER_PARTS, Use

if TYPE_CHECKING:
    from mamba_fsdp.model.config import Layer, ModelConfig

EMBEDDING = "backbone.embedding.weight"
LM_HEAD = "lm_head.weight"
MODEL_MULTIPLIERS = ("embedding", "residual", "logits", "logits_divisor")
MIXER_NAMES = ("mixer", "mixer2")  # module names of a layer's mixers, which run side by side
ORIGINAL = "original_max_position_embeddings"
ROPE_SCALINGS = {  # kind: the names of its numbers, which ops/rope.py explains
    "linear": {"factor"},
    "dynamic": {"factor", ORIGINAL},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", ORIGINAL},
    "yarn": {"factor", ORIGINAL, "beta_fast", "beta_slow", "attention_factor"},
}
NORMS = {"mixer": "norm", "mlp": "norm2"}  # part of a layer: the norm before it


class Init(NamedTuple):
    """The distribution of a parameter's initial elements, from which init.py draws. `low` and `high` are its limits."""

    kind: str
    low: float = 0.0
    high: float = 0.0


ONES = Init("ones")
NORMAL = Init("normal")
DT = Init("dt", 1e-3, 0.1)


class Parameter(NamedTuple):
    """The shape of a parameter, its initial distribution, and its treatment.

    decay   whether weight decay applies to it, as to every matrix and convolution
    fp32    whether it computes in fp32 in every precision mode; half precision changes dt by up to 1.6 % and A by 0.8 %
    rows    the number of rows of each matrix stacked in it, by name, from the top; empty outside of mixers and MLPs
    """

    shape: tuple[int, ...]
    init: Init
    decay: bool = False
    fp32: bool = False
    rows: dict[str, int] = {}

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Parameters = dict[str, Parameter]  # by name
Operators = dict[str, dict[str, int]]  # by name, each with the sizes that a Use needs


def _no_flops(config: "ModelConfig", seq_length: int) -> float:
    return 0.0


def _no_check(config: "ModelConfig") -> None:
    pass


def _no_operators(config: "ModelConfig") -> Operators:
    return {}


@dataclass(frozen=True)
class Spec:
    """One kind of mixer, or the MLP.

    parameters(config)         the parameters of one layer by name, in the order of named_parameters()
    flops(config, seq_length)  FLOPs of a forward pass per token, without the products with its parameters
    check(config)              raises UserError for impossible shapes
    operators(config)          the operators of ops/backends.py that it runs, each with the sizes that a Use needs
    stem                       the first part of the names of its multipliers in ModelConfig: STEM_in, STEM_out, and
                               STEM_NAME for each matrix of its first stacked projection
    """

    parameters: Callable[..., Parameters]
    flops: Callable[..., float] = _no_flops
    check: Callable[..., None] = _no_check
    operators: Callable[..., Operators] = _no_operators
    stem: str = "ssm"


def norm(channels: int) -> Parameter:
    return Parameter((channels,), ONES)


def matrix(outputs: int, inputs: int, scale: float = 1.0) -> Parameter:
    """Returns a matrix initialised as in PyTorch's linear layers, uniform in +-1/sqrt(inputs), divided by `scale`."""
    return stacked(inputs, scale, weight=outputs)


def stacked(inputs: int, scale: float = 1.0, **rows: int) -> Parameter:
    """Returns matrices with the same inputs, stacked as one parameter, the first on top. rows: rows of each, by
    name."""
    bound = inputs**-0.5 / scale
    init = Init("uniform", -bound, bound)
    return Parameter((sum(rows.values()), inputs), init, decay=True, rows=rows)


def into_residual(config: "ModelConfig", inputs: int) -> Parameter:
    """Returns a projection into the residual stream. Its initial values are divided by sqrt(n_layer), even if a layer
    has two such projections."""
    return matrix(config.d_model, inputs, math.sqrt(config.n_layer))


def convolution(config: "ModelConfig", channels: int) -> Parameters:
    bound = config.d_conv**-0.5
    init = Init("uniform", -bound, bound)
    return {
        "conv1d.weight": Parameter((channels, 1, config.d_conv), init, decay=True),
        "conv1d.bias": Parameter((channels,), init),
    }


def recurrence_flops(config: "ModelConfig", seq_length: int) -> float:
    """Returns the FLOPs of the recurrence, the same for every backend: each state's decay, input and share of the
    output."""
    return 2 * 3 * config.d_inner * config.d_state


def _mamba1(config: "ModelConfig") -> Parameters:
    d_inner = config.d_inner
    d_state = config.d_state
    rank = config.resolved_dt_rank
    return {
        "A_log": Parameter((d_inner, d_state), Init("log_of_column"), fp32=True),
        "D": Parameter((d_inner,), ONES, fp32=True),
        "in_proj.weight": stacked(config.d_model, x=d_inner, z=d_inner),
        **convolution(config, d_inner),
        "x_proj.weight": stacked(d_inner, dt=rank, B=d_state, C=d_state),
        "dt_proj.weight": matrix(d_inner, rank),
        "dt_proj.bias": Parameter((d_inner,), DT, fp32=True),
        "out_proj.weight": into_residual(config, d_inner),
    }


def _mamba1_operators(config: "ModelConfig") -> Operators:
    operators: Operators = {"conv": {"channels": config.d_inner}, "scan": {}}
    if not config.bcdt_norm_eps:
        operators["mamba1"] = {}
    return operators


def _mamba2(config: "ModelConfig") -> Parameters:
    d_inner = config.d_inner
    heads = config.n_ssm_head
    group_channels = config.ngroups * config.d_state
    gated_norm = {}
    if config.ssm_norm != "none":
        gated_norm = {"norm.weight": norm(d_inner)}
    return {
        "dt_bias": Parameter((heads,), DT, fp32=True),
        "A_log": Parameter((heads,), Init("log_uniform", 1.0, 16.0), fp32=True),
        "D": Parameter((heads,), ONES, fp32=True),
        "in_proj.weight": stacked(
            config.d_model, z=d_inner, x=d_inner, B=group_channels, C=group_channels, dt=heads
        ),
        **convolution(config, d_inner + 2 * group_channels),
        **gated_norm,
        "out_proj.weight": into_residual(config, d_inner),
    }


def _mamba2_operators(config: "ModelConfig") -> Operators:
    rows = {name: parameter.shape[0] for name, parameter in _mamba2(config).items()}
    operators: Operators = {"norm": {}, "conv": {"channels": rows["conv1d.weight"]}, "ssd": {}}
    if config.ssm_norm == "after":
        operators["mamba2"] = {"rows": rows["in_proj.weight"]}
    return operators


def _check_mamba2(config: "ModelConfig") -> None:
    width = "d_ssm" if config.d_ssm else "expand * d_model"
    if config.d_inner % config.headdim:
        raise UserError(
            f"headdim {config.headdim} does not divide {width} = {config.d_inner}; set another headdim or d_ssm"
        )
    if config.n_ssm_head % config.ngroups:
        raise UserError(
            f"ngroups {config.ngroups} does not divide the {config.n_ssm_head} SSM heads "
            f"({width} / headdim); set another ngroups or headdim"
        )


def _mamba3(config: "ModelConfig") -> Parameters:
    former = _mamba2(config)
    heads = config.n_ssm_head
    bias = Parameter((heads, 1, config.d_state), ONES)
    rows = former["in_proj.weight"].rows
    rows |= {"A": heads, "trapezoid": heads, "angles": config.d_state // 4}
    return {
        "dt_bias": former["dt_bias"],
        "B_bias": bias,
        "C_bias": bias,
        "D": former["D"],
        "in_proj.weight": stacked(config.d_model, **rows),
        "B_norm.weight": norm(config.d_state),
        "C_norm.weight": norm(config.d_state),
        "out_proj.weight": former["out_proj.weight"],
    }


def _gdn(config: "ModelConfig") -> Parameters:
    d_inner = config.d_inner
    heads = config.n_ssm_head
    keys = config.ngroups * config.d_state
    return {
        "dt_bias": Parameter((heads,), DT, fp32=True),
        # Published code draws A from 0 up, so that its logarithm may be infinite.
        "A_log": Parameter((heads,), Init("log_uniform", 0.01, 16.0), fp32=True),
        "in_proj.weight": stacked(
            config.d_model, q=keys, k=keys, v=d_inner, z=d_inner, b=heads, a=heads
        ),
        "conv1d.weight": convolution(config, 2 * keys + d_inner)["conv1d.weight"],
        "norm.weight": norm(config.headdim),
        "out_proj.weight": into_residual(config, d_inner),
    }


def _gdn_flops(config: "ModelConfig", seq_length: int) -> float:
    """Returns the FLOPs of each state's decay, of reading it by the key, of its input and of its share of the
    output."""
    return 2 * 4 * config.d_inner * config.d_state


def _attention(config: "ModelConfig") -> Parameters:
    queries = config.n_head * config.resolved_head_dim
    keys = config.n_kv_head * config.resolved_head_dim
    norms = {}
    if config.qk_norm == "head":
        norms = dict.fromkeys(("q_norm.weight", "k_norm.weight"), norm(config.resolved_head_dim))
    if config.qk_norm == "whole":
        norms = {"q_norm.weight": norm(queries), "k_norm.weight": norm(keys)}
    gated = 2 if config.attention_gate else 1  # each head's queries lie above its gates
    return {
        "in_proj.weight": stacked(config.d_model, q=gated * queries, k=keys, v=keys),
        **norms,
        "out_proj.weight": into_residual(config, queries),
    }


def _attention_flops(config: "ModelConfig", seq_length: int) -> float:
    """Returns the FLOPs of q . k and weights . v. Attention is causal: a position sees seq_length / 2 others on
    average."""
    return 2 * 2 * config.n_head * config.resolved_head_dim * seq_length / 2


def _check_attention(config: "ModelConfig") -> None:
    if not config.head_dim and config.d_model % config.n_head:
        raise UserError(
            f"n_head {config.n_head} does not divide d_model {config.d_model}; "
            "set head_dim or another n_head"
        )
    if config.n_head % config.n_kv_head:
        raise UserError(
            f"n_kv_head {config.n_kv_head} does not divide n_head {config.n_head}; set another n_head or n_kv_head"
        )
    if config.resolved_rotary_dim > config.resolved_head_dim or config.resolved_rotary_dim % 2:
        raise UserError(
            f"rotary_dim {config.resolved_rotary_dim} must be even and at most "
            f"head_dim {config.resolved_head_dim}"
        )

    kind, numbers = config.rope
    if kind and numbers.keys() != ROPE_SCALINGS.get(kind):
        raise UserError(
            f"rope_scaling={config.rope_scaling}: its kind or a number is unknown or missing"
        )
    if any(number <= 0 for number in numbers.values()):
        raise UserError(f"rope_scaling={config.rope_scaling}: all its numbers must be above 0")


def _mlp(config: "ModelConfig") -> Parameters:
    width = config.resolved_d_intermediate
    rows = {"through": width}
    if config.mlp_activation == "swiglu":
        rows["gate"] = width
    return {
        "fc1.weight": stacked(config.d_model, **rows),
        "fc2.weight": into_residual(config, width),
    }


MIXERS = {
    "mamba1": Spec(
        _mamba1,
        recurrence_flops,
        operators=_mamba1_operators,
    ),
    "mamba2": Spec(
        _mamba2,
        recurrence_flops,
        _check_mamba2,
        _mamba2_operators,
    ),
    "mamba3": Spec(
        _mamba3,
        recurrence_flops,
        _check_mamba2,
        lambda config: {"ssd": {}},
    ),
    "gdn": Spec(
        _gdn,
        _gdn_flops,
        _check_mamba2,
        lambda config: {
            "norm": {},
            "conv": {"channels": _gdn(config)["conv1d.weight"].shape[0]},
            "gdn": {"channels": config.d_state},
        },
    ),
    "attention": Spec(
        _attention,
        _attention_flops,
        _check_attention,
        lambda config: {"attention": {"channels": config.resolved_head_dim}},
        "attention",
    ),
    "mlp": Spec(
        _mlp,
        stem="mlp",
    ),
}
MLP = MIXERS["mlp"]  # a layer may also have it after its mixer


def embedding(config: "ModelConfig") -> Parameter:
    return Parameter((config.padded_vocab_size, config.d_model), NORMAL, decay=True)


def output_layer(config: "ModelConfig") -> Parameter:
    return matrix(config.padded_vocab_size, config.d_model)._replace(rows={})


def layer_parts(layer: "Layer") -> dict[str, Spec]:
    """Returns the mixers and the MLP of a Layer, by the names of their modules."""
    parts = {name: MIXERS[mixer] for name, mixer in zip(MIXER_NAMES, layer.mixers)}
    if layer.mlp:
        parts["mlp"] = MLP
    return parts


def parameters(config: "ModelConfig") -> Parameters:
    """Returns every parameter of the model by name, in the order of named_parameters(), without a tied output layer."""
    described = {EMBEDDING: embedding(config)}
    for index, layer in enumerate(config.layer_list()):
        prefix = f"backbone.layers.{index}"
        for part, kind in layer_parts(layer).items():
            if part in NORMS:
                described[f"{prefix}.{NORMS[part]}.weight"] = norm(config.d_model)
            described |= {
                f"{prefix}.{part}.{name}": parameter
                for name, parameter in kind.parameters(config).items()
            }
    described["backbone.norm_f.weight"] = norm(config.d_model)
    if not config.tie_embeddings:
        described[LM_HEAD] = output_layer(config)
    return described


def parameter_count(config: "ModelConfig") -> int:
    return sum(parameter.size for parameter in parameters(config).values())


def flops_per_token(config: "ModelConfig", seq_length: int) -> float:
    """Returns the FLOPs of training per token for sequences of `seq_length`: three times the FLOPs of the forward pass,
    because the backward pass takes twice as many.

    A multiply-add counts as 2. Matrices (with the output layer, without the embedding's lookup), convolutions,
    recurrences and attention's scores are counted; norms, gates and activations are not.
    """
    products = config.padded_vocab_size * config.d_model  # the output layer, tied or not
    products += sum(
        parameter.size
        for name, parameter in parameters(config).items()
        if parameter.decay and name not in (EMBEDDING, LM_HEAD)
    )
    parts = [part for layer in config.layer_list() for part in layer_parts(layer).values()]
    return 3 * (2 * products + sum(part.flops(config, seq_length) for part in parts))


def multipliers_of(config: "ModelConfig") -> list[str]:
    """Returns the names that ModelConfig.multipliers may contain, for the whole model and for its sublayers."""
    names = [*MODEL_MULTIPLIERS]
    for part in config.parts():
        rows = next(stack.rows for stack in part.parameters(config).values() if stack.rows)
        names += [f"{part.stem}_{name}" for name in ("in", "out", *rows)]
    return names


def operator_uses(
    config: "ModelConfig",
    dtype: Any,
    seq_idx: bool = False,
    deterministic: bool = False,
    in_parts: bool = False,
    tokens: int = 0,
) -> dict[str, list[Use]]:
    """Returns the Uses of each operator in the model. dtype: the torch.dtype of the activations; tokens: of a batch, if
    it is known; the other arguments are as in Use. If ranks share sequences, no mixer is computed in one call."""
    uses: dict[str, list[Use]] = {}
    always: Operators = {"norm": {}, "loss": {}}
    elements = tokens * widest_projection(config)
    for operators in (always, *(part.operators(config) for part in config.parts())):
        for operator, sizes in operators.items():
            if in_parts and operator in MIXER_PARTS:
                continue
            use = Use(
                operator,
                dtype,
                seq_idx,
                deterministic=deterministic,
                in_parts=in_parts,
                elements=elements,
                **sizes,
            )
            uses.setdefault(operator, []).append(use)
    return uses


def widest_projection(config: "ModelConfig") -> int:
    """Returns the rows of the largest matrix that a layer multiplies its input by: the channels of a token there."""
    matrices = [
        parameter
        for part in config.parts()
        for parameter in part.parameters(config).values()
        if parameter.rows
    ]
    return max((parameter.shape[0] for parameter in matrices), default=0)
