"""One position of a whole model in C (ops/step.c): Python needs many times as long for the way through the modules of a
small model as for the arithmetic."""

import ctypes
import math

import torch
import torch.nn.functional as F

from mamba_fsdp.model import spec
from mamba_fsdp.ops import cpp

# What step.c knows of a layer behind `heads` and `mlp`.
OF_A_LAYER = (
    "norm.weight",
    "mixer.in_proj.weight",
    "taps",
    "mixer.conv1d.bias",
    "mixer.x_proj.weight",
    "mixer.dt_proj.weight",
    "dt_bias",
    "A",
    "mixer.D",
    "mixer.norm.weight",
    "mixer.out_proj.weight",
    "norm2.weight",
    "mlp.fc1.weight",
    "mlp.fc2.weight",
    "conv",
    "ssm",
)
LANES = 64  # ROWS in step.c
# Products of a step: up to so many one thread is as fast as several, and up to so many parameters are copied for it.
ALONE, LARGEST = 1 << 24, 1 << 28
_ARGUMENTS = cpp.structure(
    "batch layers d_model d_inner d_state width rank groups vocabulary wide",
    "tokens layer eps embedding norm_f lm_head scratch logits",
)


def native_step(model, state):
    """What model.step does with `state`, which holds a prompt, as a function of tokens (batch,) alone; the next call
    overwrites its logits. None where there is no C for it: attention, more than LARGEST parameters, or weights that are
    not whole here, on a CPU, and of the type that they compute in."""
    config, dtype, wanted = model.config, model.compute_dtype, spec.parameters(model.config)
    weights = {
        name: weight.detach() for name, weight in model.named_parameters(remove_duplicate=False)
    }
    if (
        config.has("attention")
        or dtype not in (torch.float32, torch.float64)
        or not all(
            type(weights.get(name)) is torch.Tensor
            and weights[name].shape == parameter.shape
            and weights[name].device.type == "cpu"
            and weights[name].dtype == dtype
            for name, parameter in wanted.items()
        )
        or spec.parameter_count(config) > LARGEST
        or cpp.why_unavailable(dtype)
    ):
        return None
    layers = [
        _of_layer(weights, f"backbone.layers.{index}.", layer, layer_state)
        for index, (layer, layer_state) in enumerate(zip(config.layer_list(), state["layers"]))
    ]
    rows = [
        [
            config.n_ssm_head * (layer.mixer == "mamba2"),
            config.resolved_d_intermediate * layer.mlp,
            *(own[name].data_ptr() if name in own else 0 for name in OF_A_LAYER),
        ]
        for own, layer in zip(layers, config.layer_list())
    ]
    batch, vocabulary = len(layers[0]["conv"]), config.padded_vocab_size
    wide = max(
        parameter.shape[0]
        for name, parameter in wanted.items()
        if name not in (spec.EMBEDDING, spec.LM_HEAD)
    )
    own = {
        "tokens": torch.zeros(batch, dtype=torch.int64),
        "layer": torch.tensor(rows),
        "eps": torch.tensor(config.norm_eps, dtype=dtype),
        "embedding": weights[spec.EMBEDDING].contiguous(),
        "norm_f": weights["backbone.norm_f.weight"],
        "lm_head": packed(weights[spec.LM_HEAD]),
        "scratch": torch.empty(6, batch, wide, dtype=dtype),
        "logits": torch.empty(batch, vocabulary, dtype=dtype),
    }
    arguments = _ARGUMENTS(
        threads=1 if batch * spec.parameter_count(config) < ALONE else torch.get_num_threads(),
        batch=batch,
        layers=len(rows),
        d_model=config.d_model,
        d_inner=config.d_inner,
        d_state=config.d_state,
        width=config.d_conv,
        rank=config.resolved_dt_rank,
        groups=config.ngroups,
        vocabulary=vocabulary,
        wide=wide,
        **{name: tensor.data_ptr() for name, tensor in own.items()},
    )
    function = cpp.library(dtype).model_step

    def step(tokens, kept=layers):  # C has the addresses of what is kept
        own["tokens"].copy_(tokens)
        function(ctypes.byref(arguments))
        state["position"] += 1
        return own["logits"]

    return step


def _of_layer(weights, prefix, layer, state):
    """{name: tensor} of a layer as step.c takes them."""
    own = {
        name.removeprefix(prefix): weight.contiguous()
        for name, weight in weights.items()
        if name.startswith(prefix)
    }
    own |= {
        name: packed(own[name])
        for name in own
        if name.endswith(("proj.weight", "fc1.weight", "fc2.weight"))
    }
    state["conv"], ssm = state["conv"].contiguous(), state["ssm"].mT.contiguous()
    state["ssm"], A = ssm.mT, own["mixer.A_log"].exp() * -math.log2(math.e)
    return own | {
        "conv": state["conv"],
        "ssm": ssm,
        "A": A.T.contiguous() if A.dim() > 1 else A,
        "taps": own["mixer.conv1d.weight"].squeeze(1).T.contiguous(),
        "dt_bias": own["mixer.dt_bias" if layer.mixer == "mamba2" else "mixer.dt_proj.bias"],
    }


def packed(weight: torch.Tensor) -> torch.Tensor:
    """weight (rows, columns) -> (rows / LANES rounded up, columns, LANES), with rows of 0 at the end."""
    weight = F.pad(weight, (0, 0, 0, -len(weight) % LANES))
    return weight.view(-1, LANES, weight.shape[1]).transpose(1, 2).contiguous()
