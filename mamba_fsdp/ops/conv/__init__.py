"""The short causal convolution of an SSM layer, each channel on its own, with SiLU behind it.

y[t] = silu(bias + sum_k weight[width-1-k] * x[t-k]), with x = 0 before the row's or the document's start.
"""

from torch import Tensor

from mamba_fsdp.ops.backends import modules

BACKENDS = modules(__name__)


def causal_conv_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    seq_idx: Tensor | None = None,
    backend: str = "reference",
) -> Tensor:
    """x (batch, length, channels), weight (channels, 1, width), bias (channels) -> the shape and dtype of x.

    seq_idx: (batch, length) document index of each position; a document does not see the one before it.
    """
    return BACKENDS[backend].causal_conv_silu(x, weight, bias, seq_idx)
