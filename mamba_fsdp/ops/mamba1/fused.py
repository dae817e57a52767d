"""The Mamba-1 mixer by mamba-ssm and causal-conv1d. It keeps no documents apart, as its scan does not."""

from mamba_fsdp.ops import fused

why_unavailable = fused.need("mamba_ssm", "causal_conv1d")


def mamba1_mixer(xz, conv_weight, conv_bias, x_proj_weight, dt_proj_weight, dt_bias, A, D, out_proj_weight, documents):
    assert documents is None, "mamba-ssm's scan has no boundaries"
    from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn

    weights = (w.to(xz.dtype) for w in (conv_weight, conv_bias, x_proj_weight, dt_proj_weight, out_proj_weight))
    return mamba_inner_fn(xz.transpose(1, 2).contiguous(), *weights, None, A.float(), D=D.float(),
                          delta_bias=dt_bias.float(), delta_softplus=True)
