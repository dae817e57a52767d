"""The Mamba-2 mixer behind its input projection in one call: convolution, SSD, gated norm, output projection. By
mamba-ssm's Triton kernels and causal-conv1d; layers.py composes it of parts."""

from torch import Tensor

from mamba_fsdp.ops import fused

why_unavailable = fused.need("mamba_ssm", "causal_conv1d")


def takes(use):
    """It hands causal-conv1d a slice of its input, copied to even rows from mamba-ssm 2.2.5 on only."""
    return f"mamba-ssm takes multiples of 8 rows of its input projection, not {use.rows}" if use.rows % 8 else None


def mamba2_mixer(zxbcdt: Tensor, conv_weight: Tensor, conv_bias: Tensor, dt_bias: Tensor, A: Tensor, D: Tensor,
                 norm_weight: Tensor, norm_eps: float, out_proj_weight: Tensor, *, headdim: int, ngroups: int,
                 chunk_size: int, documents: Tensor | None = None) -> Tensor:
    """zxbcdt (batch, length, 2 d_inner + 2 ngroups d_state + heads), [z, x, B, C, dt] -> (batch, length, d_model).

    conv_weight (d_inner + 2 ngroups d_state, 1, width) and conv_bias over [x, B, C]; dt_bias, A, D (heads); norm_weight
    (d_inner), normed group by group; out_proj_weight (d_model, d_inner). The result has zxbcdt's dtype.
    """
    from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined

    return mamba_split_conv1d_scan_combined(
        zxbcdt, conv_weight.squeeze(1).to(zxbcdt.dtype), conv_bias.to(zxbcdt.dtype), dt_bias, A, D, chunk_size,
        seq_idx=fused.seq_idx(documents), activation="silu", rmsnorm_weight=norm_weight, rmsnorm_eps=norm_eps,
        outproj_weight=out_proj_weight.to(zxbcdt.dtype), headdim=headdim, ngroups=ngroups, norm_before_gate=False)
