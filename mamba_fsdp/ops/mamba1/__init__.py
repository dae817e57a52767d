"""The Mamba-1 mixer behind its input projection in one call, which makes again in the backward pass what is cheaper to
make than to keep: convolution, projections to dt, B and C, scan, output projection. layers.py composes it of parts."""

from torch import Tensor

from mamba_fsdp.ops.backends import modules

BACKENDS = modules(__name__)


def mamba1_mixer(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj_weight: Tensor,
    dt_proj_weight: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    out_proj_weight: Tensor,
    seq_idx: Tensor | None,
    *,
    backend: str,
) -> Tensor:
    """xz (batch, length, 2 d_inner), halves [x, z] -> (batch, length, d_model).

    conv_weight (d_inner, 1, width), conv_bias (d_inner); x_proj_weight (dt_rank + 2 d_state, d_inner), rows [dt, B, C];
    dt_proj_weight (d_inner, dt_rank), its bias dt_bias (d_inner); A (d_inner, d_state), D (d_inner); out_proj_weight
    (d_model, d_inner). Projections run in xz's dtype.
    """
    return BACKENDS[backend].mamba1_mixer(
        xz,
        conv_weight,
        conv_bias,
        x_proj_weight,
        dt_proj_weight,
        dt_bias,
        A,
        D,
        out_proj_weight,
        seq_idx,
    )
