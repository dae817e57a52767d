"""Computes the short causal convolution of an SSM layer, separate for each channel, followed by SiLU.

y[t] = silu(bias + sum_k weight[width-1-k] * x[t-k]), with x = 0 before the row's or the document's start.
"""

from torch import Tensor

from mamba_fsdp.ops.backends import modules

BACKENDS = modules(__name__)


def causal_conv_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    seq_idx: Tensor | None = None,
    backend: str = "reference",
) -> Tensor:
    """Returns the convolution's output, in the shape and dtype of x (batch, length, channels).

    weight (channels, 1, width); bias (channels), or None for no bias; seq_idx (batch, length): the index of the document
    of each position. With seq_idx, no position sees another document.
    """
    if bias is None:
        bias = weight.new_zeros(len(weight))
    return BACKENDS[backend].causal_conv_silu(x, weight, bias, seq_idx)
