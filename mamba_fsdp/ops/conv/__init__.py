"""The short causal convolution of an SSM layer, each channel on its own, with SiLU behind it.

y[t] = silu(bias + sum_k weight[width-1-k] * x[t-k]), with x = 0 before the row's or the document's start.
"""

from torch import Tensor

from mamba_fsdp.ops.forms import modules

FORMS = modules(__name__)


def causal_conv_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    documents: Tensor | None = None,
    form: str = "portable",
) -> Tensor:
    """x (batch, length, channels), weight (channels, 1, width), bias (channels) -> the shape and dtype of x.

    documents: (batch, length) document index of each position; a document does not see the one before it.
    """
    return FORMS[form].causal_conv_silu(x, weight, bias, documents)
