"""Draws the initial values of parameters. The distributions are the ones in the code of state-spaces/mamba:

ones            1
normal          normal with standard deviation EMBEDDING_STD
uniform         uniform between `low` and `high`
dt              log-uniform from `low` to `high`, at least DT_FLOOR, stored as the inverse of softplus
log_of_column   for A_log of Mamba-1: log(1), log(2), ... along each row
log_uniform     for A_log of Mamba-2 and Gated DeltaNet: the log of a uniform value between `low` and `high`
"""

import hashlib
import math

import torch
from torch import Tensor

from mamba_fsdp.model.spec import Init, Parameter

DT_FLOOR = 1e-4
EMBEDDING_STD = 0.02
BLOCK_ELEMENTS = 1 << 20  # number of elements that one generator draws


def initial_values(
    name: str, parameter: Parameter, seed: int, start: int, stop: int
) -> torch.Tensor:
    """Returns the initial values of elements [start, stop) of the flattened parameter `name`: 1-D, fp32, on the CPU.

    The values depend only on the arguments. Each block of the tensor has its own random generator: a rank can fill its
    part of a parameter without drawing the whole parameter, and ranks can draw their parts in any order.
    """
    if parameter.init.kind == "ones":
        return torch.ones(stop - start, dtype=torch.float32, device="cpu")
    if parameter.init.kind == "log_of_column":
        columns = parameter.shape[1]
        row = torch.arange(1, columns + 1, dtype=torch.float32, device="cpu").log()
        return row[torch.arange(start, stop, device="cpu") % columns]

    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    first_seed = int.from_bytes(digest[:8], "little") >> 1
    part = torch.empty(stop - start, dtype=torch.float32, device="cpu")
    for block in range(start // BLOCK_ELEMENTS, -(-stop // BLOCK_ELEMENTS)):
        low = block * BLOCK_ELEMENTS
        high = min((block + 1) * BLOCK_ELEMENTS, parameter.size)
        generator = torch.Generator(device="cpu").manual_seed(first_seed + block)
        values = torch.empty(high - low, dtype=torch.float32, device="cpu")
        values = _draw(values, parameter.init, generator)
        first = max(start, low)
        last = min(stop, high)
        part[first - start : last - start] = values[first - low : last - low]
    return part


def _draw(values: Tensor, init: Init, generator: torch.Generator) -> Tensor:
    """Returns `values` filled with elements drawn from the distribution of `init`."""
    if init.kind == "normal":
        return values.normal_(0.0, EMBEDDING_STD, generator=generator)
    if init.kind == "log_uniform":
        return values.uniform_(init.low, init.high, generator=generator).log_()
    if init.kind == "dt":
        values.uniform_(math.log(init.low), math.log(init.high), generator=generator)
        dt = values.exp_().clamp_(min=DT_FLOOR)
        return dt + torch.log(-torch.expm1(-dt))
    assert init.kind == "uniform", init
    return values.uniform_(init.low, init.high, generator=generator)
