"""The short causal convolution of an SSM layer, each channel on its own, with SiLU behind it.

y[t] = silu(bias + sum_k weight[width-1-k] * x[t-k]), with x = 0 before the row's or the document's start. Written as
`width` shifted multiply-adds, several times faster on a CPU than conv1d(groups=channels), with a backward of its own
that keeps nothing but the input.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from mamba_fsdp.ops import native
from mamba_fsdp.ops.kernels import compute_type


def _same_document(documents, shift, dtype):
    """1 where position t - shift lies in the document of position t, else 0: (batch, length - shift, 1)."""
    return (documents[:, shift:] == documents[:, :-shift]).unsqueeze(-1).to(dtype)


def _convolve(x, taps, bias, documents):
    """The convolution before SiLU, in taps' dtype; taps (width, channels), the last one for the current position."""
    out = torch.addcmul(bias, x, taps[-1])
    for shift in range(1, min(taps.shape[0], x.shape[1])):
        earlier = x[:, :-shift]
        if documents is not None:
            earlier = earlier * _same_document(documents, shift, x.dtype)
        out[:, shift:].addcmul_(earlier, taps[-1 - shift])
    return out


class _PortableConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, documents):
        ctx.save_for_backward(x, weight, bias, documents)
        real = compute_type(x)
        taps = weight.squeeze(1).T.to(real).contiguous()
        return F.silu(_convolve(x.to(real), taps, bias.to(real), documents), inplace=True).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, bias, documents = ctx.saved_tensors
        real = compute_type(x)
        taps = weight.squeeze(1).T.to(real).contiguous()
        values = x.to(real)
        out = _convolve(values, taps, bias.to(real), documents)
        gate = torch.sigmoid(out)
        grad = grad * gate.addcmul_(out.mul_(gate), 1 - gate)  # silu'(v) = s + v s (1 - s)
        grad_taps = torch.zeros_like(taps)
        grad_taps[-1] = (grad * values).sum((0, 1))
        grad_x = grad * taps[-1]
        for shift in range(1, min(taps.shape[0], x.shape[1])):
            later = grad[:, shift:]
            if documents is not None:
                later = later * _same_document(documents, shift, real)
            grad_taps[-1 - shift] = (later * values[:, :-shift]).sum((0, 1))
            grad_x[:, :-shift].addcmul_(later, taps[-1 - shift])
        grad_weight = grad_taps.T.unsqueeze(1).to(weight.dtype)
        return grad_x.to(x.dtype), grad_weight, grad.sum((0, 1)).to(bias.dtype), None


_CONV = native.structure("Conv", "n:threads", "n:batch", "n:length", "n:channels", "n:width", "n:x_row", "n:grad_row", "x",
                         "taps", "bias", "visible", "out", "grad_out", "grad_x", "grad_taps")


def _visible(documents, width):
    """How many of the width - 1 positions before each one lie in its document: (batch, length) uint8, or None for all."""
    if documents is None:
        return None
    count = torch.zeros(documents.shape, dtype=torch.uint8)
    for shift in range(1, min(width, documents.shape[1])):
        count[:, shift:] += documents[:, shift:] == documents[:, :-shift]
    return count


def _native_arguments(x, taps, bias, visible, **more):
    batch, length, channels = x.shape
    return _CONV(threads=torch.get_num_threads(), batch=batch, length=length, channels=channels, width=taps.shape[0],
                 x_row=x.stride(1), x=native.pointer(x), taps=native.pointer(taps), bias=native.pointer(bias),
                 visible=native.pointer(visible), **more)


class _NativeConv(torch.autograd.Function):
    """The C form, causal_conv.c."""

    @staticmethod
    def forward(ctx, x, weight, bias, documents):
        x, real = native.as_rows(x), compute_type(x)
        taps = weight.squeeze(1).T.to(real).contiguous()
        bias_real, visible = bias.to(real).contiguous(), _visible(documents, taps.shape[0])
        out = x.new_empty(x.shape)
        native.call(native.library(x.dtype).conv_forward,
                    _native_arguments(x, taps, bias_real, visible, out=native.pointer(out)))
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
        native.call(library.conv_backward, _native_arguments(
            x, taps, bias, visible, grad_out=native.pointer(grad), grad_row=grad.stride(1), grad_x=native.pointer(grad_x),
            grad_taps=native.pointer(grad_taps)))
        grad_taps = grad_taps.sum(0)
        return grad_x, grad_taps[:-1].T.unsqueeze(1).to(ctx.dtypes[0]), grad_taps[-1].to(ctx.dtypes[1]), None


@torch.compiler.disable
def _apply(function, *arguments):
    return function.apply(*arguments)


def causal_conv_silu(x, weight, bias, *, documents=None, kernels="portable"):
    """x (batch, length, channels), weight (channels, 1, width), bias (channels) -> the shape and dtype of x.

    documents: (batch, length) document index of each position; a document does not see the one before it.
    """
    if kernels == "fused" and x.shape[2] % 8 == 0:  # what the kernel demands of rows that are contiguous in channels
        return _fused(x, weight, bias, documents)
    if kernels == "native" and native.takes(x):
        return _apply(_NativeConv, x, weight, bias, documents)
    return _PortableConv.apply(x, weight, bias, documents)


def _fused(x, weight, bias, documents):
    from causal_conv1d import causal_conv1d_fn

    return causal_conv1d_fn(x.transpose(1, 2), weight.squeeze(1).to(x.dtype), bias.to(x.dtype),
                            seq_idx=None if documents is None else documents.to(torch.int32).contiguous(),
                            activation="silu").transpose(1, 2)


def causal_conv_step(state, x, weight, bias):
    """One position: x (batch, channels) -> (batch, channels). state (batch, width - 1, channels), the last inputs, oldest
    first, is updated in place."""
    real = compute_type(x)
    window = torch.cat([state.to(real), x.to(real).unsqueeze(1)], dim=1)
    state.copy_(window[:, 1:])
    return F.silu(torch.einsum("bwc,cw->bc", window, weight.squeeze(1).to(real)) + bias.to(real)).to(x.dtype)
