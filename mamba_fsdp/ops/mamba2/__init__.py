"""The Mamba-2 mixer behind its input projection in one call, which makes again in the backward pass what is cheaper to
make than to keep: convolution, SSD, gated norm, output projection. layers.py composes it of parts."""

from torch import Tensor

from mamba_fsdp.ops.backends import modules

BACKENDS = modules(__name__)


def mamba2_mixer(
    zxbcdt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    out_proj_weight: Tensor,
    seq_idx: Tensor | None,
    *,
    ngroups: int,
    headdim: int,
    chunk_size: int,
    backend: str,
) -> Tensor:
    """zxbcdt (batch, length, 2 d_inner + 2 ngroups d_state + heads), [z, x, B, C, dt] -> (batch, length, d_model).

    conv_weight (d_inner + 2 ngroups d_state, 1, width) and conv_bias over [x, B, C]; dt_bias, A, D (heads); norm_weight
    (d_inner), normed group by group; out_proj_weight (d_model, d_inner). chunk_size is the fused kernel's alone.
    """
    return BACKENDS[backend].mamba2_mixer(
        zxbcdt,
        conv_weight,
        conv_bias,
        dt_bias,
        A,
        D,
        norm_weight,
        out_proj_weight,
        seq_idx,
        norm_eps,
        ngroups,
        headdim,
        chunk_size,
    )
