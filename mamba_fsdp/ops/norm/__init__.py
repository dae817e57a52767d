"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, behind a residual sum, and gated.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019); the gated one is Mamba-2's, the norm after the
gate or before it.
"""

import torch
from torch import Tensor

from mamba_fsdp.ops.backends import modules

BACKENDS = modules(__name__)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out_dtype: torch.dtype,
    *,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    """Add x (..., channels) to the residual stream, which stays float32, and norm the sum: (normed, residual).

    residual: float32, the shape of x, or None at the first layer. weight (channels). The normed has `out_dtype`.
    """
    return BACKENDS[backend].add_rms_norm(x, residual, weight, eps, out_dtype)


def gated_rms_norm(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    group_size: int,
    *,
    norm_first: bool = False,
    backend: str = "reference",
) -> Tensor:
    """RMSNorm of x * silu(z), each group of `group_size` channels by itself; x, z (..., channels), weight (channels).
    norm_first: RMSNorm of x, times silu(z).

    Returns x's dtype. `channels` must be a multiple of group_size.
    """
    assert x.shape[-1] % group_size == 0, (x.shape[-1], group_size)
    return BACKENDS[backend].gated_rms_norm(x, z, weight, eps, group_size, norm_first)
