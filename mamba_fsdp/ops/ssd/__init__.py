"""Computes the state-space dual of Mamba-2 (SSD): a selective scan with one decay per head, in chunked matrix form.

With delta = softplus(dt + dt_bias), for every head, with the state h as a (headdim, d_state) matrix:

    h[t] = exp(delta[t] A) h[t-1] + delta[t] x[t] B[t]^T
    y[t] = h[t] C[t] + D x[t]

Source: Dao and Gu, Transformers are SSMs (2024, arXiv 2405.21060), section 6. Positions of one chunk see each other
through a masked matrix of decays times C B^T. A chunk sees earlier chunks through the state before it.
"""

from typing import Any

import torch
from torch import Tensor

from mamba_fsdp.ops.backends import modules

BACKENDS = modules(__name__)


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    *,
    chunk_size: int,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    backend: str = "reference",
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns y, in the shape and dtype of x. With return_last_state, returns (y, last state), the state in float32, or in
    float64 for float64 inputs. The sequences can have any length.

    x (batch, length, heads, headdim); dt (batch, length, heads), before bias and softplus; A (heads), negative; B, C
    (batch, length, groups, d_state), where each group serves an equal number of consecutive heads; D, dt_bias (heads).
    seq_idx (batch, length): the state is reset to zero where seq_idx changes. initial_state (batch, heads, headdim,
    d_state): the state before the first document of each row; None stands for zeros. chunk_size: the size of chunks in
    the fused kernel, and the largest size in the reference; the result does not depend on it.
    """
    assert x.shape[2] % B.shape[2] == 0, f"{B.shape[2]} groups don't divide {x.shape[2]} heads"
    return BACKENDS[backend].ssd(
        x, dt, A, B, C, D, dt_bias, chunk_size, seq_idx, initial_state, return_last_state
    )


def weighted_ssd(
    x: Tensor, decay: Tensor, weight: Tensor, B: Tensor, C: Tensor, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns what `ssd` returns, for a recurrence whose decay and input weight, both (batch, length, heads), do not depend
    on each other:

        h[t] = exp(-decay[t]) h[t-1] + weight[t] x[t] B[t]^T,    y[t] = h[t] C[t]

    This is the SSD with A = -1, delta = decay, and x multiplied by weight / decay. decay must be positive. x, B, C and the
    options are as in `ssd`.
    """
    decay = decay.clamp(min=1e-20)  # too small to change a state in any precision
    dt = decay + torch.log(-torch.expm1(-decay))  # the inverse of softplus
    zeros = decay.new_zeros(decay.shape[2])
    scaled = x * (weight / decay).unsqueeze(3)
    wide = torch.promote_types(x.dtype, torch.bfloat16)  # `scaled` may be too large for fp16
    return ssd(scaled.to(wide), dt, zeros - 1, B, C, zeros, zeros, **options)
