"""Initial values, as the reference implementation draws them (state-spaces/mamba, mamba_simple.py, mamba2.py, mixer_seq_simple.py)."""

import hashlib
import math

import torch

DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 0.1, 1e-4
A_RANGE = (1.0, 16.0)  # Mamba-2


def initial_value(name, shape, config, seed):
    """The fp32 CPU tensor that parameter `name` starts from: a function of the arguments alone, so that any rank can fill any part."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    layer = config.layer_list()[int(name.split(".")[2])] if name.startswith("backbone.layers.") else None
    kind = name.split(".", 3)[3] if layer else name

    def uniform(bound):
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def log_uniform_dt():
        drawn = torch.rand(shape, generator=generator) * (math.log(DT_MAX) - math.log(DT_MIN)) + math.log(DT_MIN)
        dt = drawn.exp().clamp_(min=DT_FLOOR)
        return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus

    if kind == "backbone.embedding.weight":
        return torch.empty(shape).normal_(0.0, 0.02, generator=generator)
    if kind.endswith(("norm.weight", "norm2.weight", "norm_f.weight", ".D")):
        return torch.ones(shape)
    if kind in ("mixer.dt_bias", "mixer.dt_proj.bias"):
        return log_uniform_dt()
    if kind == "mixer.dt_proj.weight":
        return uniform(config.resolved_dt_rank ** -0.5)
    if kind == "mixer.A_log" and layer.mixer == "mamba1":
        return torch.log(torch.arange(1, config.d_state + 1, dtype=torch.float32)).repeat(config.d_inner, 1)
    if kind == "mixer.A_log":
        return torch.empty(shape).uniform_(*A_RANGE, generator=generator).log_()
    if kind.startswith("mixer.conv1d."):
        return uniform(config.d_conv ** -0.5)  # each channel sees d_conv inputs
    value = uniform(shape[1] ** -0.5)  # nn.Linear's own
    if kind in ("mixer.out_proj.weight", "mlp.fc2.weight"):
        value /= math.sqrt(config.n_layer)
    return value
