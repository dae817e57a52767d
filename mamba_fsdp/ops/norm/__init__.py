"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, behind a residual sum, and gated.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019); the gated one is Mamba-2's, the norm after the
gate: its one form is the portable one, as it lies within mamba2's fused form.
"""

import torch
from torch import Tensor

from mamba_fsdp.ops.forms import modules
from mamba_fsdp.ops.norm.portable import gated_rms_norm as gated_rms_norm

FORMS = modules(__name__)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out_dtype: torch.dtype, *,
                 form: str = "portable") -> tuple[Tensor, Tensor]:
    """Add x (..., channels) to the residual stream, which stays float32, and norm the sum: (normed, residual).

    residual: float32, the shape of x, or None at the first layer. weight (channels). The normed has `out_dtype`.
    """
    return FORMS[form].add_rms_norm(x, residual, weight, eps, out_dtype)
