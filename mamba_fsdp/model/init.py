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
BLOCK = 1 << 20  # elements that one generator draws


def initial_value(name, shape, config, seed):
    """The whole fp32 CPU tensor that parameter `name` starts from."""
    return initial_part(name, shape, config, seed, 0, math.prod(shape)).view(shape)


def initial_part(name, shape, config, seed, start, stop):
    """Elements [start, stop) of the flattened tensor that parameter `name` starts from: 1-D, fp32, on the CPU whatever
    the current default device.

    A function of its arguments alone: each block of the tensor has a generator of its own, so that any rank can fill
    its part of any parameter, in any order, and draws little more than that.
    """
    module, leaf = name.split(".")[-2:]
    if leaf == "D" or module.startswith("norm"):
        return torch.ones(stop - start, dtype=torch.float32, device="cpu")
    if leaf == "A_log" and len(shape) == 2:
        row = torch.arange(1, shape[1] + 1, dtype=torch.float32, device="cpu").log()
        return row[torch.arange(start, stop, device="cpu") % shape[1]]

    first_seed = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
    part = torch.empty(stop - start, dtype=torch.float32, device="cpu")
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        low, high = block * BLOCK, min((block + 1) * BLOCK, math.prod(shape))
        generator = torch.Generator(device="cpu").manual_seed(first_seed + block)
        values = _draw(torch.empty(high - low, dtype=torch.float32, device="cpu"), name, shape, config, generator)
        first, last = max(start, low), min(stop, high)
        part[first - start:last - start] = values[first - low:last - low]
    return part


def _draw(values, name, shape, config, generator):
    """Some elements of a parameter that starts at random, drawn in place."""
    module, leaf = name.split(".")[-2:]
    if module == "embedding":
        return values.normal_(0.0, EMBEDDING_STD, generator=generator)
    if leaf == "A_log":
        return values.uniform_(*A_RANGE, generator=generator).log_()
    if leaf == "dt_bias" or (module, leaf) == ("dt_proj", "bias"):
        values.uniform_(math.log(DT_MIN), math.log(DT_MAX), generator=generator)
        dt = values.exp_().clamp_(min=DT_FLOOR)
        return dt + torch.log(-torch.expm1(-dt))
    inputs = config.d_conv if module == "conv1d" else shape[1]  # of a convolution's channel, the bias's too
    bound = inputs**-0.5
    if module in ("out_proj", "fc2"):
        bound /= math.sqrt(config.n_layer)
    return values.uniform_(-bound, bound, generator=generator)
