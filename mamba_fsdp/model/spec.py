"""What the layers of a model consist of and cost: the one description that all else reads. Without torch.

Initialisation, counting, weight decay, fp32 parameters, the modules, other libraries' forms and the settings that
matter all follow from it. A new mixer is an entry in MIXERS here and a class in layers.py. `config` is a ModelConfig.
"""

import math
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

from mamba_fsdp.errors import UserError
from mamba_fsdp.ops.backends import Use

EMBEDDING = "backbone.embedding.weight"
LM_HEAD = "lm_head.weight"


class Init(NamedTuple):
    """The distribution that a parameter's elements start from; init.py draws it. `low` and `high`: its limits."""

    kind: str
    low: float = 0.0
    high: float = 0.0


ONES = Init("ones")
NORMAL = Init("normal")
DT = Init("dt", 1e-3, 0.1)


class Parameter(NamedTuple):
    """decay: whether weight decay applies, which is to what activations are multiplied with, matrices and convolutions.
    fp32: it computes in fp32 in every precision mode: half precision would cost up to 1.6 % of dt and 0.8 % of A."""

    shape: tuple[int, ...]
    init: Init
    decay: bool = False
    fp32: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def _no_flops(config, seq_length):
    return 0.0


def _no_check(config):
    pass


def _no_operators(config):
    return {}


@dataclass(frozen=True)
class Spec:
    """One kind of mixer, or the MLP.

    parameters(config): those of one layer by name, in the order of named_parameters(). settings: those of ModelConfig
    that it depends on, beside d_model and n_layer. flops(config, seq_length): of a forward pass, per token, beside the
    products with its parameters. check(config) raises UserError for shapes that can't be. operators(config): those of
    ops/backends.py that it runs, with the fields of a Use that tell sizes.
    """

    settings: tuple[str, ...]
    parameters: Callable[..., dict[str, Parameter]]
    flops: Callable[..., float] = _no_flops
    check: Callable[..., None] = _no_check
    operators: Callable[..., dict[str, dict]] = _no_operators


def norm(channels):
    return Parameter((channels,), ONES)


def matrix(outputs, inputs, scale=1.0):
    """PyTorch's default for linear layers, uniform in +-1/sqrt(inputs), divided by `scale`."""
    bound = inputs**-0.5 / scale
    return Parameter((outputs, inputs), Init("uniform", -bound, bound), decay=True)


def into_residual(config, inputs):
    """A projection into the residual stream: divided by sqrt(n_layer), also where a layer has two of them."""
    return matrix(config.d_model, inputs, math.sqrt(config.n_layer))


def convolution(config, channels):
    bound = config.d_conv**-0.5
    init = Init("uniform", -bound, bound)
    return {
        "conv1d.weight": Parameter((channels, 1, config.d_conv), init, decay=True),
        "conv1d.bias": Parameter((channels,), init),
    }


def recurrence_flops(config, seq_length):
    """The recurrence once, whatever backend computes it: each state's decay, input and share of the output."""
    return 2 * 3 * config.d_inner * config.d_state


def _mamba1(config):
    d_inner = config.d_inner
    d_state = config.d_state
    rank = config.resolved_dt_rank
    return {
        "A_log": Parameter((d_inner, d_state), Init("log_of_column"), fp32=True),
        "D": Parameter((d_inner,), ONES, fp32=True),
        "in_proj.weight": matrix(2 * d_inner, config.d_model),  # rows [x, z]
        **convolution(config, d_inner),
        "x_proj.weight": matrix(rank + 2 * d_state, d_inner),  # rows [dt, B, C]
        "dt_proj.weight": matrix(d_inner, rank),
        "dt_proj.bias": Parameter((d_inner,), DT, fp32=True),
        "out_proj.weight": into_residual(config, d_inner),
    }


def _mamba2(config):
    d_inner = config.d_inner
    heads = config.n_ssm_head
    convolved = d_inner + 2 * config.ngroups * config.d_state
    return {
        "dt_bias": Parameter((heads,), DT, fp32=True),
        "A_log": Parameter((heads,), Init("log_uniform", 1.0, 16.0), fp32=True),
        "D": Parameter((heads,), ONES, fp32=True),
        "in_proj.weight": matrix(
            d_inner + convolved + heads, config.d_model
        ),  # rows [z, x, B, C, dt]
        **convolution(config, convolved),
        "norm.weight": norm(d_inner),
        "out_proj.weight": into_residual(config, d_inner),
    }


def _mamba2_operators(config):
    rows = {name: parameter.shape[0] for name, parameter in _mamba2(config).items()}
    return {
        "norm": {},
        "conv": {"channels": rows["conv1d.weight"]},
        "ssd": {},
        "mamba2": {"rows": rows["in_proj.weight"]},
    }


def _check_mamba2(config):
    if config.d_inner % config.headdim:
        raise UserError(
            f"headdim {config.headdim} does not divide expand * d_model = {config.d_inner}"
        )
    if config.n_ssm_head % config.ngroups:
        raise UserError(
            f"ngroups {config.ngroups} does not divide the {config.n_ssm_head} SSM heads "
            "(expand * d_model / headdim)"
        )


def _attention(config):
    head_dim = config.resolved_head_dim
    return {
        "in_proj.weight": matrix(
            (config.n_head + 2 * config.n_kv_head) * head_dim, config.d_model
        ),  # rows [q, k, v]
        "out_proj.weight": into_residual(config, config.n_head * head_dim),
    }


def _attention_flops(config, seq_length):
    """q . k, then weights . v, with the seq_length / 2 positions that a causal one sees on average."""
    return 2 * 2 * config.n_head * config.resolved_head_dim * seq_length / 2


def _check_attention(config):
    if not config.head_dim and config.d_model % config.n_head:
        raise UserError(
            f"n_head {config.n_head} does not divide d_model {config.d_model}; "
            "set head_dim or another n_head"
        )
    if config.n_head % config.n_kv_head:
        raise UserError(f"n_kv_head {config.n_kv_head} does not divide n_head {config.n_head}")
    if config.resolved_rotary_dim > config.resolved_head_dim or config.resolved_rotary_dim % 2:
        raise UserError(
            f"rotary_dim {config.resolved_rotary_dim} must be even and at most "
            f"head_dim {config.resolved_head_dim}"
        )


def _mlp(config):
    width = config.resolved_d_intermediate
    return {
        "fc1.weight": matrix(2 * width, config.d_model),  # rows [through, gate]
        "fc2.weight": into_residual(config, width),
    }


MIXERS = {
    "mamba1": Spec(
        ("d_state", "d_conv", "expand", "dt_rank"),
        _mamba1,
        recurrence_flops,
        operators=lambda config: {"conv": {"channels": config.d_inner}, "scan": {}, "mamba1": {}},
    ),
    "mamba2": Spec(
        ("d_state", "d_conv", "expand", "headdim", "ngroups", "chunk_size"),
        _mamba2,
        recurrence_flops,
        _check_mamba2,
        _mamba2_operators,
    ),
    "attention": Spec(
        ("n_head", "n_kv_head", "head_dim", "rotary_dim", "rope_theta"),
        _attention,
        _attention_flops,
        _check_attention,
        lambda config: {"attention": {}},
    ),
}
MLP = Spec(("d_intermediate",), _mlp)


def embedding(config) -> Parameter:
    return Parameter((config.padded_vocab_size, config.d_model), NORMAL, decay=True)


def output_layer(config) -> Parameter:
    return matrix(config.padded_vocab_size, config.d_model)


def layer_parts(layer) -> dict[str, Spec]:
    """What a Layer consists of beside its norms, under the names of its modules."""
    return {"mixer": MIXERS[layer.mixer]} | ({"mlp": MLP} if layer.mlp else {})


def parameters(config) -> dict[str, Parameter]:
    """Every parameter of the model by name, in the order of named_parameters(); a tied output layer is left out."""
    found = {EMBEDDING: embedding(config)}
    for index, layer in enumerate(config.layer_list()):
        prefix = f"backbone.layers.{index}"
        for (part, kind), norm_name in zip(layer_parts(layer).items(), ("norm", "norm2")):
            found[f"{prefix}.{norm_name}.weight"] = norm(config.d_model)
            found |= {
                f"{prefix}.{part}.{name}": parameter
                for name, parameter in kind.parameters(config).items()
            }
    found["backbone.norm_f.weight"] = norm(config.d_model)
    if not config.tie_embeddings:
        found[LM_HEAD] = output_layer(config)
    return found


def parameter_count(config) -> int:
    return sum(parameter.size for parameter in parameters(config).values())


def flops_per_token(config, seq_length: int) -> float:
    """Training FLOPs per token at sequences of `seq_length`: three times the forward pass's (the backward takes two).

    2 per multiply-add: of every matrix, the output layer among them and the embedding's lookup not; of the
    convolutions; of the recurrence; of attention's scores. Norms, gates and activations are not counted.
    """
    products = config.padded_vocab_size * config.d_model  # the output layer, tied or not
    products += sum(
        parameter.size
        for name, parameter in parameters(config).items()
        if parameter.decay and name not in (EMBEDDING, LM_HEAD)
    )
    parts = [part for layer in config.layer_list() for part in layer_parts(layer).values()]
    return 3 * (2 * products + sum(part.flops(config, seq_length) for part in parts))


def parts_that_read(setting: str) -> list[str]:
    """The mixers, and `+mlp`, that a setting of ModelConfig has an effect on."""
    return [name for name, part in {**MIXERS, "+mlp": MLP}.items() if setting in part.settings]


def operator_uses(
    config, dtype: Any, seq_idx: bool = False, deterministic: bool = False
) -> dict[str, list[Use]]:
    """What the model asks of each operator; dtype: of the activations, a torch.dtype; the others as in Use."""
    uses: dict[str, list[Use]] = {}
    for operators in (
        {"norm": {}, "loss": {}},
        *(part.operators(config) for part in config.parts()),
    ):
        for operator, sizes in operators.items():
            uses.setdefault(operator, []).append(
                Use(operator, dtype, seq_idx, deterministic=deterministic, **sizes)
            )
    return uses
