"""Computes the Mamba-1 mixer by the Triton backends of its parts. For the backward
pass, it keeps xz, the output of x_proj, fp32 copies of B and C, and the scan's states at the entries of chunks. The scan's
backward pass recomputes the scan's output."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_fsdp.ops import triton
from mamba_fsdp.ops.conv.triton import conv_backward, conv_forward
from mamba_fsdp.ops.scan.triton import Inputs, scan_backward, scan_forward


def _split(projected: Tensor, dt_proj: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two views of `projected`: the input of dt_proj, and B and C in one tensor (batch, length, 2, d_state)."""
    dt, BC = projected.tensor_split([dt_proj.shape[1]], -1)
    rows = BC.shape[:2]
    return dt, BC.view(*rows, 2, BC.shape[2] // 2)


def _forward(*tensors: Any) -> tuple[Tensor, ...]:
    xz, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A_log, D, out_proj, seq_idx, keep = (
        tensors
    )
    x, z = xz.chunk(2, -1)
    u = conv_forward(x, conv_weight, conv_bias, seq_idx)
    projected = F.linear(u, x_proj)
    rank_dt, BC = _split(projected, dt_proj)
    BC = BC.float().contiguous()
    dt = F.linear(rank_dt, dt_proj)
    inputs = Inputs(u, dt, A_log, BC, D, z, dt_bias, seq_idx, a_is_log=True)
    y, _, entries = scan_forward(inputs, None, keep)
    return F.linear(y, out_proj), projected, BC, entries


def _backward(grad: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    *inputs_of_mixer, projected, BC, entries = tensors
    xz, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, A_log, D, out_proj, seq_idx = (
        inputs_of_mixer
    )
    x, z = xz.chunk(2, -1)
    grad_xz = xz.new_empty(xz.shape)
    grad_x, grad_z = grad_xz.chunk(2, -1)
    u = conv_forward(x, conv_weight, conv_bias, seq_idx)
    rank_dt, _ = _split(projected, dt_proj)
    dt = F.linear(rank_dt, dt_proj)

    inputs = Inputs(u, dt, A_log, BC, D, z, dt_bias, seq_idx, a_is_log=True)
    grad_u, grad_dt, grad_A, grad_BC, grad_D, _, grad_bias, _, y = scan_backward(
        grad @ out_proj, None, inputs, entries, grad_z
    )
    grad_projected = torch.empty_like(projected)
    into_dt, into_BC = _split(grad_projected, dt_proj)
    torch.mm(grad_dt.flatten(0, 1), dt_proj, out=into_dt.flatten(0, 1))
    into_BC.copy_(grad_BC)
    grad_u = grad_u.flatten(0, 1).addmm_(grad_projected.flatten(0, 1), x_proj).view(u.shape)
    _, grad_conv, grad_conv_bias = conv_backward(grad_u, x, conv_weight, conv_bias, seq_idx, grad_x)
    return (
        grad_xz,
        grad_conv,
        grad_conv_bias,
        triton.weight_gradient(grad_projected, u),
        triton.weight_gradient(grad_dt, rank_dt),
        grad_bias,
        grad_A,
        grad_D,
        triton.weight_gradient(grad, y),
    )


_mixer = triton.differentiable(
    "mamba1",
    "xz conv_weight conv_bias x_proj dt_proj dt_bias A_log D out_proj seq_idx?",
    "bool keep",
    1,
    3,
    _forward,
    _backward,
)


def mamba1_mixer(*inputs: Tensor | None) -> Tensor:
    return _mixer(*inputs, torch.is_grad_enabled())[0]
