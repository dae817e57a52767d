"""Computes Mamba-1's selective scan.

With delta = softplus(dt + dt_bias), for every channel and each of its d_state states:

    h[t] = exp(delta[t] A) h[t-1] + delta[t] B[t] u[t]
    y[t] = (C[t] . h[t] + D u[t]) * silu(z[t])

Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces (2023), section 3.
"""

from torch import Tensor

from mamba_fsdp.ops.backends import modules

BACKENDS = modules(__name__)


def selective_scan(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    dt_bias: Tensor,
    *,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    backend: str = "reference",
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns y (batch, length, d_inner) in u's dtype, or (y, last state) with return_last_state.

    u, dt, z (batch, length, d_inner), dt before bias and softplus; A (d_inner, d_state), negative; B, C (batch, length,
    d_state); D, dt_bias (d_inner). initial_state and the last state are (batch, d_inner, d_state), in float32; None stands
    for zeros. seq_idx (batch, length): the index of the document of each position; the state is reset where seq_idx
    changes.
    """
    return BACKENDS[backend].selective_scan(
        u, dt, A, B, C, D, z, dt_bias, seq_idx, initial_state, return_last_state
    )
