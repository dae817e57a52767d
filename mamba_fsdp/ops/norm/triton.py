"""Computes RMSNorm with the Triton kernels in triton_kernels.py. For the backward pass, the norm of a residual sum keeps
the sum, and the gated norm keeps its inputs. Each program of the backward pass sums a part of the weight's gradient over
ROWS rows; then the parts are summed. The blocks depend only on sizes, so that equal inputs give equal bits in every run
and on all equal GPUs."""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mamba_fsdp.ops import triton

why_unavailable = triton.why_unavailable
ROWS = 16  # the number of rows of a program in the backward pass


@cache
def blocks(channels: int) -> triton.Blocks:
    """Returns the constants of a kernel for groups of this size. A thread has 8 channels; if that would take more than 16
    warps, it has 16 channels or more, in at most 32 warps."""
    block = 1 << (channels - 1).bit_length()
    warps = max(min(block // 256, 16), min(block // 512, 32), 1)
    return {"BLOCK": block, "num_warps": warps}


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (normed, total, scale). `total` is x + residual; scale (rows, 1) is the factor by which each row was
    multiplied to normalize it."""
    if residual is not None:
        residual = residual.contiguous()
    x = x.contiguous()
    normed = torch.empty_like(x, dtype=out_dtype)
    total = torch.empty_like(x, dtype=torch.float32)
    scale = _norm(x, weight, normed, eps, x.shape[-1], RESIDUAL=residual, TOTAL=total)
    return normed, total, scale


def add_norm_backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x, residual and weight. The gradient of x has the dtype of `grad`."""
    if grad_total is not None:
        grad_total = grad_total.contiguous()
    grad_x = torch.empty_like(total, dtype=grad.dtype)
    grad_residual = torch.empty_like(total)
    grad_weight = _norm_back(
        grad, total, weight, scale, grad_x, GRAD_TOTAL=grad_total, GRAD_RESIDUAL=grad_residual
    )
    return grad_x, grad_residual, grad_weight


def gated_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int, gate_last: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns (normed, scale). scale (rows, groups) is the factor by which each group was multiplied to normalize it."""
    x = x.contiguous()
    z = triton.rows(z)
    normed = torch.empty_like(x)
    scale = _norm(x, weight, normed, eps, group_size, Z=z, z_row=z.stride(1), GATE_LAST=gate_last)
    return normed, scale


def gated_norm_backward(
    grad: Tensor,
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    scale: Tensor,
    gate_last: bool = False,
    grad_z: Tensor | None = None,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x, z and weight. The gradient of z is written to `grad_z`, if given; the rows of
    `grad_z` may have any stride. The norm's output is written to `normed`, if given; with gate_last, this is the output
    before the gate."""
    x = x.contiguous()
    z = triton.rows(z)
    grad_x = torch.empty_like(x)
    grad_z = torch.empty_like(x) if grad_z is None else grad_z
    written = grad_z.view(-1, grad_z.shape[-1])  # raises an error if that would be a copy
    grad_weight = _norm_back(
        grad,
        x,
        weight,
        scale,
        grad_x,
        Z=z,
        z_row=z.stride(1),
        GRAD_Z=written,
        grad_z_row=written.stride(0),
        NORMED=normed,
        GATE_LAST=gate_last,
    )
    return grad_x, grad_z, grad_weight


def _norm(
    x: Tensor, weight: Tensor, normed: Tensor, eps: float, channels: int, **others: Any
) -> Tensor:
    """Runs the kernel and returns the scale."""
    groups = weight.numel() // channels
    scale = x.new_empty(x.shape[:-1].numel(), groups, dtype=torch.float32)
    if x.numel() and not x.is_meta:
        from mamba_fsdp.ops.norm.triton_kernels import norm

        norm[scale.shape](x, weight, normed, scale, eps, channels, **others, **blocks(channels))
    return scale


def _norm_back(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, grad_x: Tensor, **others: Any
) -> Tensor:
    """Runs the kernel and returns the weight's gradient."""
    rows, groups = scale.shape
    channels = weight.numel() // groups
    programs = -(-rows // ROWS)
    sums = scale.new_empty(programs, weight.numel())
    if x.numel() and not x.is_meta:
        from mamba_fsdp.ops.norm.triton_kernels import norm_back

        norm_back[programs, groups](
            grad.contiguous(),
            x,
            weight,
            scale,
            grad_x,
            sums,
            rows,
            channels,
            ROWS,
            **others,
            **blocks(channels),
        )
    return sums.sum(0)


class _AddNorm(Function):
    """add_norm with its gradient. For the backward pass, it keeps the sum instead of the inputs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        with triton.below_autograd():
            normed, total, scale = _add_norm(x, residual, weight, *rest)
        ctx.save_for_backward(total, weight, scale)
        ctx.mark_non_differentiable(scale)
        ctx.set_materialize_grads(False)
        ctx.has_residual = residual is not None
        return normed, total, scale

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_total: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        total, weight, scale = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(total)
        grads = _add_norm_backward(grad, grad_total, total, weight, scale)
        grad_x, grad_residual, grad_weight = grads
        if not ctx.has_residual:
            grad_residual = None
        return grad_x, grad_residual, grad_weight, None, None


_add_norm_backward = triton.operator(
    "add_norm_backward(Tensor grad, Tensor? grad_total, Tensor total, Tensor weight, Tensor scale) "
    "-> (Tensor, Tensor, Tensor)",
    add_norm_backward,
    add_norm_backward,
)
_add_norm = triton.operator(
    "add_norm(Tensor x, Tensor? residual, Tensor weight, float eps, ScalarType out_dtype) "
    "-> (Tensor, Tensor, Tensor)",
    add_norm,
    add_norm,
    _AddNorm,
)


def _gated(name: str, gate_last: bool) -> Any:
    forward = partial(gated_norm, gate_last=gate_last)
    backward = partial(gated_norm_backward, gate_last=gate_last)
    return triton.differentiable(
        name, "x z weight", "float eps, int group_size", 1, 1, forward, backward
    )


_gate_first = _gated("gate_norm", False)
_gate_last = _gated("norm_gate", True)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    normed, total, _ = _add_norm(x, residual, weight, eps, out_dtype)
    return normed, total


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int, norm_first: bool = False
) -> Tensor:
    gated = _gate_last if norm_first else _gate_first
    return gated(x, z, weight, eps, group_size)[0]
