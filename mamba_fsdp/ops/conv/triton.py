"""Computes the causal convolution with the Triton kernel in triton_kernels.py. Only the inputs are kept for the backward
pass. In the backward pass, each program sums a part of the weight's gradient over a block of rows, without atomic
additions, so that every run gives the same bits."""

import torch
from torch import Tensor

from mamba_fsdp.ops import triton

why_unavailable = triton.why_unavailable
FORWARD = {(8, 0): {"ROWS": 128, "CHANNELS": 256, "num_warps": 1}}
BACKWARD = {(8, 0): {"ROWS": 128, "CHANNELS": 128, "num_warps": 1}}


def conv_forward(x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None) -> Tensor:
    out = x.new_empty(x.shape)
    _walk(triton.blocks(FORWARD, x.device), x, weight, bias, seq_idx, out)
    return out


def conv_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    seq_idx: Tensor | None,
    grad_x: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Returns the gradients of x, weight and bias. The gradient of x is written to `grad_x`, if given; the rows of
    `grad_x` may have any stride, the same over the whole batch."""
    grad_x = x.new_empty(x.shape) if grad_x is None else grad_x
    blocks = triton.blocks(BACKWARD, x.device)
    parts = x.shape[0] * -(-x.shape[1] // blocks["ROWS"])
    sums = x.new_empty(parts, weight.numel() + bias.numel(), dtype=torch.float32)
    _walk(blocks, x, weight, bias, seq_idx, grad_x, grad, sums)
    grad_weight, grad_bias = sums.sum(0).tensor_split([weight.numel()])
    return grad_x, grad_weight.view(weight.shape), grad_bias


def _walk(
    blocks: triton.Blocks,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    seq_idx: Tensor | None,
    out: Tensor,
    grad: Tensor | None = None,
    sums: Tensor | None = None,
) -> None:
    if x.is_meta or not x.numel():
        return
    from mamba_fsdp.ops.conv.triton_kernels import walk

    width = weight.shape[2]
    assert 2 <= width <= 4, width  # the bounds of d_conv
    batch, length, channels = x.shape
    row_programs = -(-length // blocks["ROWS"])
    channel_programs = -(-channels // blocks["CHANNELS"])
    x = triton.rows(x)
    grad = None if grad is None else triton.rows(grad)
    walk[(batch * row_programs * channel_programs,)](
        X=x,
        WEIGHT=weight.contiguous(),
        BIAS=bias.contiguous(),
        SEQ_IDX=None if seq_idx is None else seq_idx.contiguous(),
        OUT=out,
        GRAD=grad,
        SUMS=sums,
        length=length,
        channels=channels,
        row_programs=row_programs,
        channel_programs=channel_programs,
        WIDTH=width,
        BACK=0 if grad is None else 3,
        x_row=x.stride(1),
        out_row=out.stride(1),
        grad_row=0 if grad is None else grad.stride(1),
        **blocks,
    )


causal_conv_silu = triton.differentiable(
    "conv", "x weight bias seq_idx?", "", 1, 0, conv_forward, conv_backward
)
