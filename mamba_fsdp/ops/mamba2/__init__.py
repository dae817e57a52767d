"""The Mamba-2 mixer behind its input projection in one call, which makes again in the backward pass what is cheaper to
make than to keep: convolution, SSD, gated norm, output projection. layers.py composes it of parts."""

from torch import Tensor

from mamba_fsdp.ops.backends import modules

BACKENDS = modules(__name__)


def mamba2_mixer(*inputs: Tensor | float | None, backend: str) -> Tensor:
    """Returns (batch, length, d_model) of these, in this order.

    zxbcdt       (batch, length, 2 d_inner + 2 ngroups d_state + heads), [z, x, B, C, dt]
    conv_weight  (d_inner + 2 ngroups d_state, 1, width), conv_bias: of [x, B, C]
    dt_bias      (heads), as A and D
    norm         (d_inner), the weight of the norm, which is of each group
    out_proj     (d_model, d_inner)
    seq_idx      (batch, length), or None
    eps          of the norm
    ngroups, headdim, and chunk_size, which is the fused kernel's alone
    """
    return BACKENDS[backend].mamba2_mixer(*inputs)
