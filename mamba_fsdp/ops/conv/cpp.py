"""Computes the causal convolution in C: causal_conv.c."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mamba_fsdp.ops import cpp
from mamba_fsdp.ops.conv.reference import apply

why_not = cpp.why_not
why_unavailable = cpp.why_unavailable
_ARGUMENTS = cpp.structure(
    "batch length channels width x_row grad_out_row",
    "x taps bias visible out grad_out grad_x grad_taps",
)


def _visible(seq_idx: Tensor | None, width: int) -> Tensor | None:
    """Returns, for each position, how many of the width - 1 positions before it are in its document: (batch, length)
    uint8, or None for all of them."""
    if seq_idx is None:
        return None
    count = torch.zeros(seq_idx.shape, dtype=torch.uint8)
    for shift in range(1, min(width, seq_idx.shape[1])):
        count[:, shift:] += seq_idx[:, shift:] == seq_idx[:, :-shift]
    return count


def _call(function: Callable[..., int], inputs: Sequence[Tensor | None], **more: Tensor) -> None:
    values: dict[str, Any] = dict(zip(("x", "taps", "bias", "visible"), inputs))
    values["batch"], values["length"], values["channels"] = values["x"].shape
    values["width"] = len(values["taps"])
    cpp.call(function, _ARGUMENTS, values | more)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, bias: Tensor, seq_idx: Tensor | None) -> Tensor:
        (x,) = cpp.as_rows(x)
        inputs = (x, taps, bias, _visible(seq_idx, len(taps)))
        out = x.new_empty(x.shape)
        _call(cpp.library(x.dtype).conv_forward, inputs, out=out)
        ctx.save_for_backward(*inputs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: recomputed activations can be read only once
        x, taps, _, _ = saved
        (grad,) = cpp.as_rows(grad)
        library = cpp.library(x.dtype)
        blocks = x.shape[0] * -(-x.shape[1] // library.conv_steps())
        grad_x = x.new_empty(x.shape)
        grad_taps = taps.new_empty(blocks, len(taps) + 1, taps.shape[1])  # bias: the last row
        _call(
            library.conv_backward,
            saved,
            grad_out=grad,
            grad_x=grad_x,
            grad_taps=grad_taps,
        )
        sums = grad_taps.sum(0)
        return grad_x, sums[:-1], sums[-1], None


causal_conv_silu = partial(apply, _Conv)
