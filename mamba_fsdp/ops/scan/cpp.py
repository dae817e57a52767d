"""The selective scan in C: selective_scan.c."""

from functools import partial

import torch
from torch.autograd.function import once_differentiable

from mamba_fsdp.ops import cpp
from mamba_fsdp.ops.scan.reference import apply

takes, why_unavailable = cpp.takes, cpp.why_unavailable
_ARGUMENTS = cpp.structure(
    "batch length d_inner d_state u_row dt_row B_row C_row z_row grad_out_row",
    "u dt B C z A D bias starts out entries state grad_out grad_state grad_u grad_dt grad_z grad_B grad_C grad_A "
    "grad_D grad_bias",
)


def _call(function, u, dt, A, B, C, D, z, bias, starts, entries, **more):
    batch, length, d_inner = u.shape
    cpp.call(
        function,
        _ARGUMENTS,
        batch=batch,
        length=length,
        d_inner=d_inner,
        d_state=A.shape[0],
        u=u,
        dt=dt,
        A=A,
        B=B,
        C=C,
        D=D,
        z=z,
        bias=bias,
        starts=starts,
        entries=entries,
        **more,
    )


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, dt, A, B, C, D, z, bias, starts, state):
        u, dt, B, C, z = cpp.as_rows(u, dt, B, C, z)
        library, out, state = cpp.library(u.dtype), u.new_empty(u.shape), state.clone()
        entries = state.new_empty(u.shape[0], -(-u.shape[1] // library.scan_steps()), *A.shape)
        inputs = u, dt, A, B, C, D, z, bias, starts, entries
        _call(library.scan_forward, *inputs, out=out, state=state)
        ctx.save_for_backward(*inputs)
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_last_state):
        u, dt, A, B, C, D, z, bias, starts, entries = inputs = ctx.saved_tensors
        (batch, length, d_inner), d_state = u.shape, A.shape[0]
        library, (grad_out,) = cpp.library(u.dtype), cpp.as_rows(grad_out)
        grad_u, grad_dt, grad_z = (None if v is None else u.new_empty(u.shape) for v in (u, dt, z))
        groups = -(-d_inner // library.scan_group())
        grad_B, grad_C = (A.new_empty(groups, batch, length, d_state) for _ in range(2))
        grad_A, grad_D, grad_bias = (A.new_zeros(batch, *v.shape) for v in (A, D, bias))
        grad_state = grad_last_state.clone(memory_format=torch.contiguous_format)
        _call(
            library.scan_backward,
            *inputs,
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
