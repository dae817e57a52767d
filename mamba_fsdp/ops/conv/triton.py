"""The causal convolution by a Triton kernel: triton_kernels.py. It keeps its input alone for the backward pass, where
every block of rows sums its part of the weight's gradient: the same bits at every run."""

import torch
from torch.autograd.function import once_differentiable

from mamba_fsdp.ops import triton

why_unavailable = triton.why_unavailable
FORWARD = {(8, 0): {"ROWS": 128, "CHANNELS": 256, "num_warps": 1}}
BACKWARD = {(8, 0): {"ROWS": 128, "CHANNELS": 128, "num_warps": 1}}


def conv_forward(x, weight, bias, documents):
    out = x.new_empty(x.shape)
    _walk(x, weight, bias, documents, out, triton.blocks("conv_forward", FORWARD, x.device), BACK=0, GRAD=None,
          SUMS=None, grad_batch=0, grad_row=0)
    return out


def conv_backward(grad, x, weight, bias, documents, grad_x=None):
    """The gradients of x, weight and bias; that of x is written to `grad_x` where it is given, rows of any stride."""
    grad, grad_x = _even(grad), x.new_empty(x.shape) if grad_x is None else grad_x
    blocks = triton.blocks("conv_backward", BACKWARD, x.device)
    sums = x.new_empty(x.shape[0], -(-x.shape[1] // blocks["ROWS"]), 5, x.shape[2], dtype=torch.float32)
    _walk(x, weight, bias, documents, grad_x, blocks, BACK=3, GRAD=grad, SUMS=sums, grad_batch=grad.stride(0),
          grad_row=grad.stride(1))
    *taps, of_bias = sums.sum((0, 1))[4 - weight.shape[2]:]
    return grad_x, torch.stack(taps, 1).unsqueeze(1).to(weight.dtype), of_bias.to(bias.dtype)


def _even(x):
    return x if x.stride(-1) == 1 else x.contiguous()


def _walk(x, weight, bias, documents, out, blocks, **more):
    from mamba_fsdp.ops.conv.triton_kernels import walk

    x, documents = _even(x), None if documents is None else _even(documents)
    batch, length, channels = x.shape
    row_programs, channel_programs = -(-length // blocks["ROWS"]), -(-channels // blocks["CHANNELS"])
    if x.numel():
        walk[(batch * row_programs * channel_programs,)](
            X=x, WEIGHT=weight.contiguous(), BIAS=bias.contiguous(), DOCUMENTS=documents, OUT=out, length=length,
            channels=channels, x_batch=x.stride(0), x_row=x.stride(1), out_batch=out.stride(0), out_row=out.stride(1),
            documents_batch=0 if documents is None else documents.stride(0), row_programs=row_programs,
            channel_programs=channel_programs, WIDTH=weight.shape[2], **more, **blocks)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        with triton.below_autograd():
            return causal_conv_silu(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return *_gradients(grad, *ctx.saved_tensors), None


causal_conv_silu = triton.operator("conv_forward(Tensor x, Tensor weight, Tensor bias, Tensor? documents) -> Tensor",
                                   conv_forward, lambda x, *_: x.new_empty(x.shape), _Conv)
_gradients = triton.operator(
    "conv_backward(Tensor grad, Tensor x, Tensor weight, Tensor bias, Tensor? documents) -> (Tensor, Tensor, Tensor)",
    conv_backward, lambda _, *inputs: tuple(t.new_empty(t.shape) for t in inputs[:3]))
