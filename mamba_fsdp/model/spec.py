"""Describes the parameters and the costs of each kind of layer. This file does not need torch.

This is the only description of the layers: the modules, initialization, weight decay, the choice of fp32 parameters,
the counts of parameters and FLOPs, and the formats of other libraries are derived from it. To add a mixer, add an entry
to MIXERS here, a class to layers.py, and its settings to config.py. `config` is always a ModelConfig.
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
MIXER_NAMES = ("mixer", "mixer2")  # module names; mixer2 runs beside mixer
ORIGINAL_LENGTH = "original_max_position_embeddings"
ROPE_SCALINGS = {  # {kind: names of its parameters}; see ops/rope.py
    "linear": {"factor"},
    "dynamic": {"factor", ORIGINAL_LENGTH},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", ORIGINAL_LENGTH},
    "yarn": {"factor", ORIGINAL_LENGTH, "beta_fast", "beta_slow", "attention_factor"},
}
NORMS = {"mixer": "norm", "mlp": "norm2"}  # {module of a layer: module of the norm before it}


class Init(NamedTuple):
    """The distribution of the initial values of a parameter; see init.py for the kinds. low, high: limits of a
    value."""

    kind: str
    low: float = 0.0
    high: float = 0.0


ONES = Init("ones")
NORMAL = Init("normal")
DT = Init("dt", 1e-3, 0.1)


class Parameter(NamedTuple):
    """The shape of a parameter, the distribution of its initial values, and how training treats it.

    decay   Whether weight decay applies to the parameter. It applies to matrices and convolutions.
    fp32    Whether the parameter stays in fp32 in every precision mode. Half precision would change dt by up to 1.6 %
            and A by up to 0.8 %.
    rows    {name: number of rows} of the matrices that are stacked in the parameter, the top one first. It is empty
            for parameters other than the matrices of mixers and MLPs.
    """

    shape: tuple[int, ...]
    init: Init
    decay: bool = False
    fp32: bool = False
    rows: dict[str, int] = {}

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Parameters = dict[str, Parameter]  # {name: parameter}
# {operator: the sizes of its tensors, by the names of fields of Use}
Operators = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Spec:
    """One kind of mixer, or the MLP.

    parameters(config)         Returns the parameters of one layer by name, in the order of named_parameters().
    flops(config, seq_length)  Returns the FLOPs per token of a forward pass, without the products with parameters.
    check(config)              Raises UserError for shapes that do not fit together.
    operators(config)          Returns the operators of ops/backends.py that the mixer or MLP runs, with the sizes of
                               their tensors.
    multiplier_prefix          The prefix of the multipliers in ModelConfig.multipliers that apply to the mixer or MLP.
                               These are PREFIX_in, PREFIX_out, and PREFIX_NAME for each matrix NAME of the first
                               projection.
    """

    parameters: Callable[..., Parameters]
    flops: Callable[..., float] = lambda *_: 0.0
    check: Callable[..., None] = lambda *_: None
    operators: Callable[..., Operators] = lambda *_: {}
    multiplier_prefix: str = "ssm"


def norm(channels: int) -> Parameter:
    return Parameter((channels,), ONES)


def matrix(outputs: int, inputs: int, scale: float = 1.0) -> Parameter:
    """Returns a weight (outputs, inputs). Its initial values are uniform in +-1/sqrt(inputs), as in torch.nn.Linear,
    divided by `scale`."""
    return stacked_matrices(inputs, scale, weight=outputs)


def stacked_matrices(inputs: int, scale: float = 1.0, **rows: int) -> Parameter:
    """Returns one parameter (sum of rows, inputs) that stacks several matrices with the same input, the first on top.

    rows: the number of rows of each matrix, by name. scale: as for `matrix`."""
    bound = inputs**-0.5 / scale
    init = Init("uniform", -bound, bound)
    return Parameter((sum(rows.values()), inputs), init, decay=True, rows=rows)


def residual_projection(config: "ModelConfig", inputs: int) -> Parameter:
    """Returns the weight of a projection into the residual stream. Its initial values are those of `matrix`, divided by
    sqrt(n_layer). This divisor is the same for layers with one and with two such projections."""
    return matrix(config.d_model, inputs, math.sqrt(config.n_layer))


def convolution(config: "ModelConfig", channels: int) -> Parameters:
    bound = config.d_conv**-0.5
    init = Init("uniform", -bound, bound)
    return {
        "conv1d.weight": Parameter((channels, 1, config.d_conv), init, decay=True),
        "conv1d.bias": Parameter((channels,), init),
    }


def recurrence_flops(config: "ModelConfig", seq_length: int) -> float:
    """Returns the FLOPs per token of the recurrence, the same for every backend. Each element of the state takes three
    multiply-adds: its decay, its input and its contribution to the output."""
    return 2 * 3 * config.d_inner * config.d_state


def _mamba1(config: "ModelConfig") -> Parameters:
    d_inner = config.d_inner
    d_state = config.d_state
    rank = config.resolved_dt_rank
    return {
        "A_log": Parameter((d_inner, d_state), Init("log_of_column"), fp32=True),
        "D": Parameter((d_inner,), ONES, fp32=True),
        "in_proj.weight": stacked_matrices(config.d_model, x=d_inner, z=d_inner),
        **convolution(config, d_inner),
        "x_proj.weight": stacked_matrices(d_inner, dt=rank, B=d_state, C=d_state),
        "dt_proj.weight": matrix(d_inner, rank),
        "dt_proj.bias": Parameter((d_inner,), DT, fp32=True),
        "out_proj.weight": residual_projection(config, d_inner),
    }


def _mamba1_operators(config: "ModelConfig") -> Operators:
    operators: Operators = {"conv": {"channels": config.d_inner}}
    operators["scan"] = {"channels": config.d_state}
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
        "in_proj.weight": stacked_matrices(
            config.d_model, z=d_inner, x=d_inner, B=group_channels, C=group_channels, dt=heads
        ),
        **convolution(config, d_inner + 2 * group_channels),
        **gated_norm,
        "out_proj.weight": residual_projection(config, d_inner),
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
    mamba2 = _mamba2(config)
    heads = config.n_ssm_head
    bias = Parameter((heads, 1, config.d_state), ONES)
    rows = mamba2["in_proj.weight"].rows
    rows |= {"A": heads, "trapezoid": heads, "angles": config.d_state // 4}
    return {
        "dt_bias": mamba2["dt_bias"],
        "B_bias": bias,
        "C_bias": bias,
        "D": mamba2["D"],
        "in_proj.weight": stacked_matrices(config.d_model, **rows),
        "B_norm.weight": norm(config.d_state),
        "C_norm.weight": norm(config.d_state),
        "out_proj.weight": mamba2["out_proj.weight"],
    }


def _gdn(config: "ModelConfig") -> Parameters:
    d_inner = config.d_inner
    heads = config.n_ssm_head
    keys = config.ngroups * config.d_state
    return {
        "dt_bias": Parameter((heads,), DT, fp32=True),
        # The published code draws A from [0, 16). The logarithm of 0 would be minus infinity.
        "A_log": Parameter((heads,), Init("log_uniform", 0.01, 16.0), fp32=True),
        "in_proj.weight": stacked_matrices(
            config.d_model, q=keys, k=keys, v=d_inner, z=d_inner, b=heads, a=heads
        ),
        "conv1d.weight": convolution(config, 2 * keys + d_inner)["conv1d.weight"],
        "norm.weight": norm(config.headdim),
        "out_proj.weight": residual_projection(config, d_inner),
    }


def _gdn_flops(config: "ModelConfig", seq_length: int) -> float:
    """Returns the FLOPs per token of the recurrence. Each element of the state takes four multiply-adds: its decay, its
    product with the key, its input and its contribution to the output."""
    return 2 * 4 * config.d_inner * config.d_state


def _attention(config: "ModelConfig") -> Parameters:
    queries = config.n_head * config.resolved_head_dim
    keys = config.n_kv_head * config.resolved_head_dim
    norms = {}
    if config.qk_norm == "head":
        norms = dict.fromkeys(("q_norm.weight", "k_norm.weight"), norm(config.resolved_head_dim))
    if config.qk_norm == "whole":
        norms = {"q_norm.weight": norm(queries), "k_norm.weight": norm(keys)}
    # The stacked matrix contains the queries of each head above its gates.
    gated = 2 if config.attention_gate else 1
    return {
        "in_proj.weight": stacked_matrices(config.d_model, q=gated * queries, k=keys, v=keys),
        **norms,
        "out_proj.weight": residual_projection(config, queries),
    }


def _attention_flops(config: "ModelConfig", seq_length: int) -> float:
    """Returns the FLOPs per token of the two products of attention, q . k and weights . v. Attention is causal, so
    a position attends to seq_length / 2 positions on average."""
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

    kind, values = config.rope
    if kind and values.keys() != ROPE_SCALINGS.get(kind):
        raise UserError(
            f"rope_scaling={config.rope_scaling}: the kind is unknown, or its numbers are not the ones that this kind needs; see --help=rope_scaling"
        )
    if any(value <= 0 for value in values.values()):
        raise UserError(f"rope_scaling={config.rope_scaling}: all numbers must be above 0")


def _mlp(config: "ModelConfig") -> Parameters:
    width = config.resolved_d_intermediate
    rows = {"through": width}
    if config.mlp_activation == "swiglu":
        rows["gate"] = width
    return {
        "fc1.weight": stacked_matrices(config.d_model, **rows),
        "fc2.weight": residual_projection(config, width),
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
        multiplier_prefix="mlp",
    ),
}
MLP = MIXERS["mlp"]  # either the only part of a layer, or the part after the mixer (+mlp)


def embedding(config: "ModelConfig") -> Parameter:
    return Parameter((config.padded_vocab_size, config.d_model), NORMAL, decay=True)


def output_layer(config: "ModelConfig") -> Parameter:
    return matrix(config.padded_vocab_size, config.d_model)._replace(rows={})


def layer_parts(layer: "Layer") -> dict[str, Spec]:
    """Returns the specs of a layer's mixers and MLP, by the names of their modules."""
    parts = {name: MIXERS[mixer] for name, mixer in zip(MIXER_NAMES, layer.mixers)}
    if layer.mlp:
        parts["mlp"] = MLP
    return parts


def parameters(config: "ModelConfig") -> Parameters:
    """Returns the parameters of the model by name, in the order of named_parameters(). A tied output layer is left
    out."""
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
    """Returns the training FLOPs per token for sequences of length `seq_length`. They are three times the FLOPs of the
    forward pass, because the backward pass takes twice as many.

    A multiply-add counts as 2 FLOPs. The count includes matrices, the output layer, convolutions, recurrences and the
    products of attention. It does not include the lookup of embeddings, norms, gates and activations.
    """
    # The output layer counts even if it is tied to the embedding.
    multiplied = config.padded_vocab_size * config.d_model
    multiplied += sum(
        parameter.size
        for name, parameter in parameters(config).items()
        if parameter.decay and name not in (EMBEDDING, LM_HEAD)
    )
    parts = [part for layer in config.layer_list() for part in layer_parts(layer).values()]
    return 3 * (2 * multiplied + sum(part.flops(config, seq_length) for part in parts))


def multiplier_names(config: "ModelConfig") -> list[str]:
    """Returns the names that ModelConfig.multipliers can contain for this model."""
    names = [*MODEL_MULTIPLIERS]
    for part in config.parts():
        rows = next(stack.rows for stack in part.parameters(config).values() if stack.rows)
        names += [f"{part.multiplier_prefix}_{name}" for name in ("in", "out", *rows)]
    return names


def operator_uses(
    config: "ModelConfig",
    dtype: Any,
    seq_idx: bool = False,
    deterministic: bool = False,
    in_parts: bool = False,
    tokens: int = 0,
) -> dict[str, list[Use]]:
    """Returns {operator: its Uses in the model}.

    dtype: the torch.dtype of the activations. tokens: the number of tokens in a micro-batch, 0 if it is unknown. The
    other arguments are fields of Use. With in_parts (ranks share sequences), operators that compute a whole mixer are
    left out."""
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
    """Returns the largest number of channels that a token has between two projections: the rows of the widest
    matrix."""
    matrices = [
        parameter
        for part in config.parts()
        for parameter in part.parameters(config).values()
        if parameter.rows
    ]
    return max((parameter.shape[0] for parameter in matrices), default=0)
