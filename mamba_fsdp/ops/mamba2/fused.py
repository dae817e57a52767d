"""The Mamba-2 mixer by mamba-ssm's Triton kernels and causal-conv1d."""

from mamba_fsdp.ops import fused

why_unavailable = fused.need("mamba_ssm", "causal_conv1d")


def takes(use):
    """It hands causal-conv1d a slice of its input, copied to even rows from mamba-ssm 2.2.5 on only."""
    return f"mamba-ssm takes multiples of 8 rows of its input projection, not {use.rows}" if use.rows % 8 else None


def mamba2_mixer(zxbcdt, weight, bias, dt_bias, A, D, norm, out_proj, documents, eps, groups, headdim, chunk_size):
    from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined

    return mamba_split_conv1d_scan_combined(
        zxbcdt, weight.squeeze(1).to(zxbcdt.dtype), bias.to(zxbcdt.dtype), dt_bias, A, D, chunk_size,
        seq_idx=fused.seq_idx(documents), activation="silu", rmsnorm_weight=norm, rmsnorm_eps=eps,
        outproj_weight=out_proj.to(zxbcdt.dtype), headdim=headdim, ngroups=groups, norm_before_gate=False)
