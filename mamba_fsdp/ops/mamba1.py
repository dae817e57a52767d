"""The Mamba-1 mixer behind its input projection in one call: convolution, projections to dt, B and C, scan, output
projection. By mamba-ssm, whose backward pass makes again what is cheap to make; layers.py composes it of parts."""

from torch import Tensor

from mamba_fsdp.ops import fused

why_unavailable = fused.need("mamba_ssm", "causal_conv1d")


def mamba1_mixer(xz: Tensor, conv_weight: Tensor, conv_bias: Tensor, x_proj_weight: Tensor, dt_proj_weight: Tensor,
                 dt_bias: Tensor, A: Tensor, D: Tensor, out_proj_weight: Tensor) -> Tensor:
    """xz (batch, length, 2 d_inner), halves [x, z] -> (batch, length, d_model).

    conv_weight (d_inner, 1, width), conv_bias (d_inner); x_proj_weight (dt_rank + 2 d_state, d_inner), rows [dt, B, C];
    dt_proj_weight (d_inner, dt_rank), its bias dt_bias (d_inner); A (d_inner, d_state), D (d_inner); out_proj_weight
    (d_model, d_inner). Projections run in xz's dtype. It keeps no documents apart, as its scan does not.
    """
    from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn

    weights = (w.to(xz.dtype) for w in (conv_weight, conv_bias, x_proj_weight, dt_proj_weight, out_proj_weight))
    return mamba_inner_fn(xz.transpose(1, 2).contiguous(), *weights, None, A.float(), D=D.float(),
                          delta_bias=dt_bias.float(), delta_softplus=True)
