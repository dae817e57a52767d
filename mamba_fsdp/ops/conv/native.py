"""The causal convolution in C: causal_conv.c."""

import torch
from torch.autograd.function import once_differentiable

from mamba_fsdp.conventions import compute_type
from mamba_fsdp.ops import native

takes, why_unavailable = native.takes, native.why_unavailable
_ARGUMENTS = native.structure("Conv", "n:batch", "n:length", "n:channels", "n:width", "n:x_row", "n:grad_out_row", "x",
                              "taps", "bias", "visible", "out", "grad_out", "grad_x", "grad_taps")


def _visible(documents, width):
    """How many of the width - 1 positions before each lie in its document: (batch, length) uint8, or None for all."""
    if documents is None:
        return None
    count = torch.zeros(documents.shape, dtype=torch.uint8)
    for shift in range(1, min(width, documents.shape[1])):
        count[:, shift:] += documents[:, shift:] == documents[:, :-shift]
    return count


def _call(function, x, taps, **more):
    batch, length, channels = x.shape
    native.call(function, _ARGUMENTS, batch=batch, length=length, channels=channels, width=taps.shape[0], x=x,
                taps=taps, **more)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, documents):
        native.check(x)
        x, real = native.as_rows(x), compute_type(x)
        taps = weight.squeeze(1).T.to(real).contiguous()
        bias_real, visible = bias.to(real).contiguous(), _visible(documents, taps.shape[0])
        out = x.new_empty(x.shape)
        _call(native.library(x.dtype).conv_forward, x, taps, bias=bias_real, visible=visible, out=out)
        ctx.save_for_backward(x, taps, bias_real, visible)
        ctx.dtypes = weight.dtype, bias.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, taps, bias, visible = ctx.saved_tensors
        grad, grad_x = native.as_rows(grad), x.new_empty(x.shape)
        library = native.library(x.dtype)
        blocks = x.shape[0] * -(-x.shape[1] // library.conv_steps())
        grad_taps = taps.new_empty(blocks, taps.shape[0] + 1, taps.shape[1])
        _call(library.conv_backward, x, taps, bias=bias, visible=visible, grad_out=grad, grad_x=grad_x,
              grad_taps=grad_taps)
        grad_taps = grad_taps.sum(0)
        return grad_x, grad_taps[:-1].T.unsqueeze(1).to(ctx.dtypes[0]), grad_taps[-1].to(ctx.dtypes[1]), None


@torch.compiler.disable
def causal_conv_silu(x, weight, bias, documents):
    return _Conv.apply(x, weight, bias, documents)
