"""What every parameter starts from: the distributions that state-spaces/mamba really draws.

Embedding: normal. Matrices and convolutions: PyTorch's default, uniform in +-1/sqrt(inputs). Projections into the
residual stream (out_proj, fc2): that divided by sqrt(n_layer), also where a layer has two of them. dt: log-uniform from
DT_MIN to DT_MAX, stored as softplus's inverse. A: 1..d_state for every channel (Mamba-1), uniform in A_RANGE for every
head (Mamba-2). D and norms: 1.
"""

import hashlib
import math

import torch

DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 0.1, 1e-4
A_RANGE = (1.0, 16.0)
EMBEDDING_STD = 0.02


def initial_value(name, shape, config, seed):
    """The fp32 CPU tensor that parameter `name` starts from, whatever the current default device.

    A function of its arguments alone, so that any rank can fill any part of any parameter, in any order.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    value = torch.empty(shape, dtype=torch.float32, device="cpu")
    module, leaf = name.split(".")[-2:]

    if module == "embedding":
        return value.normal_(0.0, EMBEDDING_STD, generator=generator)
    if leaf == "D" or module.startswith("norm"):
        return value.fill_(1.0)
    if leaf == "A_log" and len(shape) == 2:
        return value.copy_(torch.arange(1, shape[1] + 1, dtype=torch.float32, device="cpu").log())
    if leaf == "A_log":
        return value.uniform_(*A_RANGE, generator=generator).log_()
    if leaf == "dt_bias" or (module, leaf) == ("dt_proj", "bias"):
        value.uniform_(math.log(DT_MIN), math.log(DT_MAX), generator=generator)
        dt = value.exp_().clamp_(min=DT_FLOOR)
        return dt + torch.log(-torch.expm1(-dt))
    inputs = config.d_conv if module == "conv1d" else shape[1]  # of a convolution's channel, the bias's too
    bound = inputs**-0.5
    if module in ("out_proj", "fc2"):
        bound /= math.sqrt(config.n_layer)
    return value.uniform_(-bound, bound, generator=generator)
