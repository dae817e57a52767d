"""The causal convolution in C: causal_conv.c."""

from functools import partial

import torch
from torch.autograd.function import once_differentiable

from mamba_fsdp.ops import cpp
from mamba_fsdp.ops.conv.reference import apply

takes, why_unavailable = cpp.takes, cpp.why_unavailable
_ARGUMENTS = cpp.structure(
    "batch length channels width x_row grad_out_row",
    "x taps bias visible out grad_out grad_x grad_taps",
)


def _visible(seq_idx, width):
    """How many of the width - 1 positions before each lie in its document: (batch, length) uint8, or None for all."""
    if seq_idx is None:
        return None
    count = torch.zeros(seq_idx.shape, dtype=torch.uint8)
    for shift in range(1, min(width, seq_idx.shape[1])):
        count[:, shift:] += seq_idx[:, shift:] == seq_idx[:, :-shift]
    return count


def _call(function, x, taps, bias, visible, **more):
    batch, length, channels = x.shape
    cpp.call(
        function,
        _ARGUMENTS,
        batch=batch,
        length=length,
        channels=channels,
        width=taps.shape[0],
        x=x,
        taps=taps,
        bias=bias,
        visible=visible,
        **more,
    )


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, taps, bias, seq_idx):
        (x,) = cpp.as_rows(x)
        inputs, out = (x, taps, bias, _visible(seq_idx, taps.shape[0])), x.new_empty(x.shape)
        _call(cpp.library(x.dtype).conv_forward, *inputs, out=out)
        ctx.save_for_backward(*inputs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, taps, *_ = inputs = ctx.saved_tensors
        (grad,) = cpp.as_rows(grad)
        library, grad_x = cpp.library(x.dtype), x.new_empty(x.shape)
        blocks = x.shape[0] * -(-x.shape[1] // library.conv_steps())
        grads = taps.new_empty(
            blocks, taps.shape[0] + 1, taps.shape[1]
        )  # of the taps, then of the bias
        _call(library.conv_backward, *inputs, grad_out=grad, grad_x=grad_x, grad_taps=grads)
        grads = grads.sum(0)
        return grad_x, grads[:-1], grads[-1], None


causal_conv_silu = partial(apply, _Conv)
