"""Computes RMSNorm over the last dimension, y = x / sqrt(mean(x^2) + eps) * weight, for a residual sum or with a gate.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019). The gated norm is Mamba-2's, with the norm
after the gate or before it.
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
    """Returns (normed, sum). `sum` is x + residual, in float32, and becomes the residual of the next call. `normed` is the
    RMSNorm of `sum`, in `out_dtype`.

    x (..., channels); residual: a float32 tensor in the shape of x, or None in the first layer; weight (channels).
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
    """Returns the RMSNorm of x * silu(z), separate for each group of `group_size` channels, in x's dtype. With norm_first,
    returns the RMSNorm of x, multiplied by silu(z).

    x, z (..., channels); weight (channels). `channels` must be a multiple of group_size.
    """
    assert x.shape[-1] % group_size == 0, (x.shape[-1], group_size)
    return BACKENDS[backend].gated_rms_norm(x, z, weight, eps, group_size, norm_first)
