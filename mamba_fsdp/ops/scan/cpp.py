"""Computes the selective scan in C: selective_scan.c."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mamba_fsdp.ops import cpp
from mamba_fsdp.ops.scan.reference import apply

why_not = cpp.why_not
why_unavailable = cpp.why_unavailable
_INPUTS = ("u", "dt", "A", "B", "C", "D", "z", "bias", "starts", "entries")
_ARGUMENTS = cpp.structure(  # in the order of the C code
    "batch length d_inner d_state u_row dt_row B_row C_row z_row grad_out_row",
    "u dt B C z A D bias starts out entries state grad_out grad_state grad_u grad_dt grad_z grad_B grad_C grad_A "
    "grad_D grad_bias",
)


def _call(function: Callable[..., int], inputs: Sequence[Tensor | None], **more: Tensor) -> None:
    values: dict[str, Any] = dict(zip(_INPUTS, inputs))
    values["batch"], values["length"], values["d_inner"] = values["u"].shape
    values["d_state"] = len(values["A"])
    cpp.call(function, _ARGUMENTS, values | more)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        u, dt, A, B, C, D, z, bias, starts, state = inputs
        u, dt, B, C, z = cpp.as_rows(u, dt, B, C, z)
        library = cpp.library(u.dtype)
        out = u.new_empty(u.shape)
        state = state.clone()
        entries = state.new_empty(len(u), -(-u.shape[1] // library.scan_steps()), *A.shape)
        saved = (u, dt, A, B, C, D, z, bias, starts, entries)
        _call(library.scan_forward, saved, out=out, state=state)
        ctx.save_for_backward(*saved)
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_last_state: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: recomputed activations can be read only once
        u, _, A, B, C, D, _, bias, _, _ = saved
        batch, length, d_inner = u.shape
        library = cpp.library(u.dtype)
        (grad_out,) = cpp.as_rows(grad_out)
        grad_state = grad_last_state.clone(memory_format=torch.contiguous_format)
        grad_u = u.new_empty(u.shape)
        grad_dt = u.new_empty(u.shape)
        grad_z = u.new_empty(u.shape)
        groups = -(-d_inner // library.scan_group())
        grad_B = A.new_empty(groups, batch, length, len(A))
        grad_C = torch.empty_like(grad_B)
        grad_A = A.new_zeros(batch, *A.shape)
        grad_D = A.new_zeros(batch, *D.shape)
        grad_bias = A.new_zeros(batch, *bias.shape)
        _call(
            library.scan_backward,
            saved,
            grad_out=grad_out,
            grad_state=grad_state,
            grad_u=grad_u,
            grad_dt=grad_dt,
            grad_z=grad_z,
            grad_B=grad_B,
            grad_C=grad_C,
            grad_A=grad_A,
            grad_D=grad_D,
            grad_bias=grad_bias,
        )
        return (
            grad_u,
            grad_dt,
            grad_A.sum(0),
            grad_B.sum(0).to(B.dtype),
            grad_C.sum(0).to(C.dtype),
            grad_D.sum(0),
            grad_z,
            grad_bias.sum(0),
            None,
            grad_state,
        )


selective_scan = partial(apply, _Scan)
