"""Computes RMSNorm in plain PyTorch, in float32 (float64 for float64 input). The backward pass is written out, because
autograd would keep several float32 copies of the activations for it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mamba_fsdp.conventions import compute_type


class _RMSNorm(torch.autograd.Function):
    """The RMSNorm of x (rows, groups, channels) with weight (groups, channels)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        values = x.to(compute_type(x))
        scale = (
            torch.linalg.vector_norm(values, dim=-1, keepdim=True)
            .square_()
            .div_(x.shape[-1])
            .add_(eps)
            .rsqrt_()
        )
        ctx.save_for_backward(x, weight, scale)
        return (values * scale).mul_(weight.to(values.dtype)).to(out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        grad = grad.to(scale.dtype)
        product = grad * normed
        grad_weight = product.sum(0).to(weight.dtype)
        projection = product.mul_(weight).mean(-1, keepdim=True)
        grad_x = (
            torch.mul(grad, weight).addcmul_(normed, projection, value=-1).mul_(scale).to(x.dtype)
        )
        return grad_x, grad_weight, None, None


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype, groups: int = 1
) -> Tensor:
    """Returns the RMSNorm of x (..., channels), separate for each of `groups` equal groups of channels, in `out_dtype`.

    x can have any float dtype. weight (channels)."""
    weight = weight.reshape(groups, -1)
    return _RMSNorm.apply(x.reshape(-1, *weight.shape), weight, eps, out_dtype).reshape(x.shape)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    # The first layer copies x, because FSDP warns about a block that returns its own input.
    residual = x.to(compute_type(x), copy=True) if residual is None else residual + x
    return rms_norm(residual, weight, eps, out_dtype), residual


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int, norm_first: bool = False
) -> Tensor:
    real = compute_type(x)
    gate = F.silu(z.to(real))
    groups = x.shape[-1] // group_size
    if norm_first:
        return (rms_norm(x, weight, eps, real, groups) * gate).to(x.dtype)
    return rms_norm(x.to(real) * gate, weight, eps, x.dtype, groups)
