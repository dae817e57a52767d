"""The selective scan in C: selective_scan.c."""

import torch
from torch.autograd.function import once_differentiable

from mamba_fsdp.conventions import compute_type
from mamba_fsdp.ops import native
from mamba_fsdp.ops.scan.portable import apply

takes, why_unavailable = native.takes, native.why_unavailable
_ARGUMENTS = native.structure(
    "Scan", "n:batch", "n:length", "n:d_inner", "n:d_state", "n:u_row", "n:dt_row", "n:B_row", "n:C_row", "n:z_row",
    "n:grad_out_row", "u", "dt", "B", "C", "z", "A", "D", "bias", "starts", "out", "entries", "state", "grad_out",
    "grad_state", "grad_u", "grad_dt", "grad_z", "grad_B", "grad_C", "grad_A", "grad_D", "grad_bias")


def _call(function, u, dt, A, B, C, D, z, bias, starts, entries, **more):
    batch, length, d_inner = u.shape
    native.call(function, _ARGUMENTS, batch=batch, length=length, d_inner=d_inner, d_state=A.shape[0], u=u, dt=dt, A=A,
                B=B, C=C, D=D, z=z, bias=bias, starts=starts, entries=entries, **more)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, dt, A, B, C, D, z, dt_bias, starts, initial_state):
        native.check(u, dt, B, C, z)
        real = compute_type(u)
        u, dt, B, C, z = (native.as_rows(value) for value in (u, dt, B, C, z))
        A_rows = A.T.to(real).contiguous()
        D_real, bias = (None if v is None else v.to(real).contiguous() for v in (D, dt_bias))
        batch, length, d_inner = u.shape
        library = native.library(u.dtype)
        out = u.new_empty(u.shape)
        state = initial_state.transpose(1, 2).to(real, copy=True, memory_format=torch.contiguous_format)
        entries = state.new_empty(batch, -(-length // library.scan_steps()), *A_rows.shape)
        _call(library.scan_forward, u, dt, A_rows, B, C, D_real, z, bias, starts, entries, out=out, state=state)
        ctx.save_for_backward(u, dt, A_rows, B, C, D_real, z, bias, starts, entries)
        ctx.dtypes = [None if v is None else v.dtype for v in (A, D, dt_bias, initial_state)]
        return out, state.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_last_state):
        u, dt, A_rows, B, C, D, z, bias, starts, entries = ctx.saved_tensors
        (batch, length, d_inner), d_state = u.shape, A_rows.shape[0]
        library = native.library(u.dtype)
        grad_out = native.as_rows(grad_out)
        grad_u, grad_dt = u.new_empty(u.shape), u.new_empty(u.shape)
        grad_z = None if z is None else u.new_empty(u.shape)
        groups = -(-d_inner // library.scan_group())
        grad_B, grad_C = (entries.new_empty(groups, batch, length, d_state) for _ in range(2))
        grad_state = grad_last_state.transpose(1, 2).to(entries.dtype).contiguous().clone()
        grad_A = entries.new_zeros(batch, d_state, d_inner)
        grad_D, grad_bias = (entries.new_zeros(batch, d_inner) for _ in range(2))
        _call(library.scan_backward, u, dt, A_rows, B, C, D, z, bias, starts, entries, grad_out=grad_out,
              grad_state=grad_state, grad_u=grad_u, grad_dt=grad_dt, grad_z=grad_z, grad_B=grad_B, grad_C=grad_C,
              grad_A=grad_A, grad_D=grad_D, grad_bias=grad_bias)
        A_type, D_type, bias_type, state_type = ctx.dtypes
        return (grad_u, grad_dt, grad_A.sum(0).T.to(A_type), grad_B.sum(0).to(B.dtype), grad_C.sum(0).to(C.dtype),
                None if D is None else grad_D.sum(0).to(D_type), grad_z,
                None if bias is None else grad_bias.sum(0).to(bias_type), None,
                grad_state.transpose(1, 2).to(state_type))


@torch.compiler.disable
def selective_scan(*arguments):
    return apply(_Scan, *arguments)
