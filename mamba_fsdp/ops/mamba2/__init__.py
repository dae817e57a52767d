"""Computes the Mamba-2 mixer after its input projection, in one call: convolution, SSD, gated norm, output projection.
The backward pass recomputes values that are cheaper to recompute than to keep. layers.py composes the same mixer
from separate operators."""

from torch import Tensor

from mamba_fsdp.ops.backends import modules

BACKENDS = modules(__name__)


def mamba2_mixer(*inputs: Tensor | float | None, backend: str) -> Tensor:
    """Returns the mixer's output (batch, length, d_model) for these inputs, in this order.

    zxbcdt       (batch, length, 2 d_inner + 2 ngroups d_state + heads), [z, x, B, C, dt]
    conv_weight  (d_inner + 2 ngroups d_state, 1, width), followed by conv_bias: the convolution of [x, B, C]
    dt_bias      (heads), followed by A_log (heads), which is log(-A), and D (heads)
    norm         (d_inner), the weight of the norm, which norms each group separately
    out_proj     (d_model, d_inner), in zxbcdt's dtype
    seq_idx      (batch, length), or None
    eps          the epsilon of the norm
    ngroups, headdim, and chunk_size, which only the fused kernel reads
    """
    return BACKENDS[backend].mamba2_mixer(*inputs)
