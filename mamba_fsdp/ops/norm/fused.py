"""RMSNorm behind a residual sum or a gate by mamba-ssm's Triton kernels."""

from mamba_fsdp.ops import fused

why_unavailable = fused.need("mamba_ssm")
VARIES = "mamba-ssm before 2.3 tunes its norm anew at each start, and later ones are not measured"


def add_rms_norm(x, residual, weight, eps, out_dtype):
    from mamba_ssm.ops.triton.layer_norm import rms_norm_fn

    normed, residual = rms_norm_fn(x, weight, None, residual=residual, eps=eps, prenorm=True, residual_in_fp32=True)
    return normed.to(out_dtype), residual


def gated_rms_norm(x, z, weight, eps, group_size):
    from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

    return rmsnorm_fn(x, weight, None, z=z, eps=eps, group_size=group_size, norm_before_gate=False)
