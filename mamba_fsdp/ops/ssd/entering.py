"""Computes the part of SSD's output that comes from the state before the first position. SSD is linear in this state,
so that the part can be added to an output computed from zeros: with s[t] = sum of delta A over the positions up to t,

    y[t] += exp(s[t]) h C[t]
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_fsdp.conventions import compute_type
from mamba_fsdp.ops.ssd.reference import running_sums


def decays_from_start(dt: Tensor, A: Tensor, dt_bias: Tensor) -> Tensor:
    """Returns exp(s[t]), the factor by which the positions up to t multiply a state before the first position: a tensor
    (batch, length, heads) in compute type. dt (batch, length, heads) and A, dt_bias (heads) are as in `ssd`."""
    real = compute_type(dt)
    delta = F.softplus(dt.to(real) + dt_bias.to(real))
    exponents = running_sums((delta * A.to(real)).unsqueeze(1))
    return exponents.squeeze(1).exp()


def output_of_state(C: Tensor, state: Tensor, decays: Tensor) -> Tensor:
    """Returns the part of the output that comes from the state before the first position, (batch, length, heads,
    headdim).

    C (batch, length, groups, d_state); state (batch, heads, headdim, d_state): the state before the first position;
    decays (batch, length, heads): the result of decays_from_start. The state is multiplied with C in C's dtype."""
    groups = C.shape[2]
    by_group = state.to(C.dtype).unflatten(1, (groups, -1)).flatten(2, 3)
    read = torch.einsum("zlgn,zgkn->zlgk", C, by_group)
    return read.flatten(2).unflatten(2, state.shape[1:3]) * decays.unsqueeze(3)
