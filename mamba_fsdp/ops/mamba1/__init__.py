"""Computes the Mamba-1 mixer after its input projection, in one call: convolution, projections to dt, B and C, scan,
output projection. The backward pass recomputes values that are cheaper to recompute than to keep. layers.py composes
the same mixer from separate operators."""

from torch import Tensor

from mamba_fsdp.ops.backends import modules

BACKENDS = modules(__name__)


def mamba1_mixer(*tensors: Tensor | None, backend: str) -> Tensor:
    """Returns the mixer's output (batch, length, d_model) for these inputs, in this order. The weights of
    projections are in xz's dtype.

    xz           (batch, length, 2 d_inner), halves [x, z]
    conv_weight  (d_inner, 1, width), conv_bias (d_inner)
    x_proj       (dt_rank + 2 d_state, d_inner), rows [dt, B, C]
    dt_proj      (d_inner, dt_rank), followed by its bias dt_bias (d_inner)
    A_log        (d_inner, d_state), log(-A); D (d_inner)
    out_proj     (d_model, d_inner)
    seq_idx      (batch, length), or None
    """
    return BACKENDS[backend].mamba1_mixer(*tensors)
