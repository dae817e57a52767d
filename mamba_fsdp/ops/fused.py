"""The fused backends: operators and mixers computed by the CUDA and Triton kernels of mamba-ssm, causal-conv1d and
flash-linear-attention."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_fsdp.errors import UserError
from mamba_fsdp.ops import attention
from mamba_fsdp.ops.backends import Use
from mamba_fsdp.ops.negative_exp import NegativeExp

FUNCTIONS = (  # the functions of this module that call the libraries
    "causal_conv_silu",
    "selective_scan",
    "ssd",
    "gated_delta_rule",
    "add_rms_norm",
    "gated_rms_norm",
    "mamba1_mixer",
    "mamba2_mixer",
)
# The libraries compute offsets in 32 bits (state-spaces/mamba #1015). In tensors of 2^31 or more elements, these overflow.
REACH = 1 << 31
# {operator: why the results of equal runs can differ in bits}
VARIES = {
    "conv": "causal-conv1d before 1.6 adds with atomics, and later versions are not measured",
    "scan": "mamba-ssm's scan adds its gradients with atomics",
    "ssd": "mamba-ssm's SSD takes sums that torch then refuses",
    "gdn": "flash-linear-attention tunes its kernels again at each start",
    "norm": "mamba-ssm before 2.3 tunes its norm again at each start, and later versions are not measured",
}


def why_not(use: Use) -> str | None:
    if use.deterministic and use.operator in VARIES:
        return f"deterministic=true, and {VARIES[use.operator]}"
    if use.elements >= REACH:
        return f"mamba-ssm's kernels support 2^31 elements, but a batch has {use.elements:,}: lower batch_size"
    if use.operator == "conv" and use.channels % 8:
        return f"causal-conv1d takes multiples of 8 channels, not {use.channels}"
    if use.operator == "gdn" and use.channels > 256:
        return f"flash-linear-attention takes a d_state of up to 256, not {use.channels}"
    if use.operator == "scan" and use.seq_idx:
        return "mamba-ssm's scan can't separate documents"
    if use.operator == "scan" and use.in_parts:
        return "mamba-ssm's scan can't begin from a state"
    # mamba-ssm passes a slice of the projection to causal-conv1d, which needs a distance between positions that is a
    # multiple of 8 elements. mamba-ssm copies the slice only from version 2.2.5 on.
    if use.operator == "mamba2" and use.rows % 8:
        return f"mamba-ssm takes multiples of 8 rows of its input projection, not {use.rows}"
    return None


def check_reach(*tensors: Tensor) -> None:
    """Raises UserError if a tensor, for example of a very long prompt, has elements that 32-bit offsets can't reach."""
    for tensor in tensors:
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
        if last >= REACH:
            raise UserError(
                f"a batch of {tensor.shape[0]} x {tensor.shape[1]:,} tokens spans {last + 1:,} elements, but mamba-ssm's kernels "
                "support 2^31; give fewer or shorter sequences at a time"
            )


def causal_conv_silu(x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None) -> Tensor:
    from causal_conv1d import causal_conv1d_fn

    check_reach(x)
    if x.stride(1) % 8:  # the distance between positions must be a multiple of 8 elements
        x = x.contiguous()
    out = causal_conv1d_fn(
        x.transpose(1, 2),
        weight.squeeze(1).to(x.dtype),
        bias.to(x.dtype),
        seq_idx=_from_zero(seq_idx),
        activation="silu",
    )
    return out.transpose(1, 2)


def selective_scan(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    dt_bias: Tensor,
    seq_idx: Tensor | None,
    initial_state: Tensor | None,
    return_last_state: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    assert seq_idx is None and initial_state is None, (
        "mamba-ssm's scan has no boundaries and no initial state"
    )
    assert not (return_last_state and torch.is_grad_enabled()), (
        "mamba-ssm's scan has no gradient through its state"
    )
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    check_reach(u, dt, B, C, z)

    def channels_first(value: Tensor) -> Tensor:
        return value.transpose(1, 2).contiguous()

    out = selective_scan_fn(
        channels_first(u),
        channels_first(dt),
        A.float(),
        channels_first(B),
        channels_first(C),
        D.float(),
        channels_first(z),
        dt_bias.float(),
        delta_softplus=True,
        return_last_state=return_last_state,
    )
    if return_last_state:
        out, state = out
        return out.transpose(1, 2), state
    return out.transpose(1, 2)


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None,
    initial_state: Tensor | None,
    return_last_state: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    check_reach(x, B, C)
    return mamba_chunk_scan_combined(
        x,
        dt,
        A,
        B,
        C,
        chunk_size,
        D=D,
        dt_bias=dt_bias,
        dt_softplus=True,
        initial_states=initial_state,
        seq_idx=_from_zero(seq_idx),
        return_final_states=return_last_state,
    )


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    seq_idx: Tensor | None,
    initial_state: Tensor | None,
    return_last_state: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    inputs = [q, k, v, g, beta]
    bounds = None
    if seq_idx is not None:  # all documents are then in one row, and `bounds` separates them
        assert initial_state is None and not return_last_state, "each document has a state"
        inputs = [t.flatten(0, 1).unsqueeze(0) for t in inputs]
        bounds = _document_bounds(seq_idx)
    y, last = chunk_gated_delta_rule(
        *inputs,
        initial_state=initial_state,
        output_final_state=return_last_state,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=bounds,
    )
    y = y.view(v.shape)
    return (y, last) if return_last_state else y


@functools.lru_cache(maxsize=1)
def _document_bounds(seq_idx: Tensor) -> Tensor:
    """Returns the offsets in the flattened batch at which documents start, and the end of the batch. The host waits for
    their number, so the result is cached for all layers."""
    is_bound = F.pad(attention.starts(seq_idx).flatten(), (0, 1), value=True)
    return is_bound.nonzero().flatten()


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    from mamba_ssm.ops.triton.layer_norm import rms_norm_fn

    check_reach(x)
    normed, residual = rms_norm_fn(
        x, weight, None, residual=residual, eps=eps, prenorm=True, residual_in_fp32=True
    )
    return normed.to(out_dtype), residual


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int, norm_first: bool = False
) -> Tensor:
    from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

    check_reach(x, z)
    return rmsnorm_fn(
        x, weight, None, z=z, eps=eps, group_size=group_size, norm_before_gate=norm_first
    )


def mamba1_mixer(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    out_proj: Tensor,
    seq_idx: Tensor | None,
) -> Tensor:
    assert seq_idx is None, "mamba-ssm's scan has no boundaries"
    from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn

    check_reach(xz)
    conv = [w.to(xz.dtype) for w in (conv_weight, conv_bias)]
    return mamba_inner_fn(
        xz.transpose(1, 2).contiguous(),
        *conv,
        x_proj,
        dt_proj,
        out_proj,
        None,
        NegativeExp.apply(A_log.float()),
        D=D.float(),
        delta_bias=dt_bias.float(),
        delta_softplus=True,
    )


def mamba2_mixer(
    zxbcdt: Tensor,
    weight: Tensor,
    bias: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    norm: Tensor,
    out_proj: Tensor,
    seq_idx: Tensor | None,
    eps: float,
    groups: int,
    headdim: int,
    chunk_size: int,
) -> Tensor:
    from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined

    check_reach(zxbcdt)
    return mamba_split_conv1d_scan_combined(
        zxbcdt,
        weight.squeeze(1).to(zxbcdt.dtype),
        bias.to(zxbcdt.dtype),
        dt_bias,
        NegativeExp.apply(A_log.float()),
        D,
        chunk_size,
        seq_idx=_from_zero(seq_idx),
        activation="silu",
        rmsnorm_weight=norm,
        rmsnorm_eps=eps,
        outproj_weight=out_proj,
        headdim=headdim,
        ngroups=groups,
        norm_before_gate=False,
    )


def _from_zero(seq_idx: Tensor | None) -> Tensor | None:
    """Returns seq_idx as the libraries need it: int32, and 0 for the document that an initial state belongs to."""
    if seq_idx is None:
        return None
    return (seq_idx - seq_idx[:, :1]).to(torch.int32).contiguous()
