"""The selective scan in Triton: triton_kernels.py. Equal inputs give equal bits on equal GPUs: nothing is added by
atomics, and how a row is cut depends on its sizes alone."""

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from mamba_fsdp.ops import triton

why_unavailable = triton.why_unavailable
STATES, CHUNK = 16, 64  # of a launch; positions from one kept state to the next
FILL = 1024  # warps that keep a GPU busy: where batch and channels make fewer, rows are cut
TABLE = {(8, 0): {"CHANNELS": 32, "num_warps": 1}}  # of both kernels


def takes(use):
    return "it calculates in float32" if use.dtype == torch.float64 else None


def _rows(activations):
    """(batch, length, channels), or None, as the kernels read it: channels side by side, rows evenly spaced."""
    a = activations
    return a if a is None or (a.stride(2) == 1 and a.stride(0) == a.shape[1] * a.stride(1)) else a.contiguous()


def _columns(states):
    """(..., d_inner, d_state), or None, in float32 with d_inner last."""
    return None if states is None else states.transpose(-1, -2).float().contiguous()


def _or(tensor, other):
    """For a tensor that is absent another, which the kernel will not look into."""
    return other if tensor is None else tensor


class _Scan:
    """The inputs of a scan as the kernels take them, and how its rows are cut."""

    def __init__(self, kernel, u, dt, A, B, C, D, z, dt_bias, documents):
        self.sizes = triton.blocks(kernel, TABLE, u.device)
        self.u, self.dt, self.B, self.C, self.z = map(_rows, (u, dt, B, C, z))
        self.A, self.documents = _columns(A), None if documents is None else documents.contiguous()
        self.D, self.bias = (self.A.new_zeros(len(A)) if v is None else v.float().contiguous() for v in (D, dt_bias))
        (self.batch, self.length, self.channels), self.states = u.shape, A.shape[1]
        blocks, self.chunks = -(-self.channels // self.sizes["CHANNELS"]), -(-self.length // CHUNK)
        self.segment_chunks = -(-self.chunks // min(-(-FILL // (self.batch * blocks)), self.chunks))
        self.grid = blocks, -(-self.chunks // self.segment_chunks), self.batch
        self.new = self.A.new_empty

    def launches(self, value, z, matrix, reverse):
        """For every STATES of the states: kernels, the first of them, whether there are no more, constants, and what
        `local` made of value, z and matrix. Nothing where tensors have no content."""
        if self.u.is_meta:
            return
        from mamba_fsdp.ops.scan import triton_kernels as kernels

        blocks, segments, batch = self.grid
        ends, totals = self.new(batch, segments, self.states, self.channels), self.new(batch, segments, self.channels)
        step = min(STATES, 1 << (self.states - 1).bit_length())
        for first in range(0, self.states, step):
            even = self.channels % self.sizes["CHANNELS"] == self.length % 4 == 0 and first + step <= self.states
            constants = dict(self.sizes, DOCUMENTS=self.documents is not None, EVEN=even, N=step, CHUNK=CHUNK)
            if segments > 1:
                kernels.local[blocks, segments - 1, batch](
                    value, self.dt, self.A[first:], _or(z, value), matrix[..., first:], self.bias,
                    _or(self.documents, value), ends[:, :, first:], totals, value.stride(1), self.dt.stride(1),
                    _or(z, value).stride(1), matrix.stride(1), self.length, self.channels, self.states - first,
                    self.states * self.channels, self.segment_chunks, REVERSE=reverse, GATED=z is not None, **constants)
            constants |= {"CUT": segments > 1, "FIRST": first == 0}
            yield kernels, first, first + step >= self.states, constants, ends[:, :, first:], totals


def scan_forward(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
                 dt_bias: Tensor | None, documents: Tensor | None, state: Tensor | None, keep: bool = True
                 ) -> tuple[Tensor, Tensor, Tensor]:
    """y, the last state and, with `keep`, what scan_backward begins at: states (batch, chunks, d_state, d_inner)."""
    s, state = _Scan("scan_forward", u, dt, A, B, C, D, z, dt_bias, documents), _columns(state)
    out, last = u.new_empty(u.shape), s.new(s.batch, s.states, s.channels)
    entries = s.new(s.batch, s.chunks if keep else 0, s.states, s.channels)
    partial = s.new(u.shape if s.states > STATES else 0)
    for kernels, first, final, constants, ends, totals in s.launches(s.u, None, s.B, False):
        kernels.forward[s.grid](
            s.u, s.dt, s.A[first:], s.B[..., first:], s.C[..., first:], s.D, _or(s.z, s.u), s.bias,
            _or(s.documents, s.u), _or(state, last)[:, first:], ends, totals, partial, out if final else partial,
            entries[:, :, first:], last[:, first:], s.u.stride(1), s.dt.stride(1), _or(s.z, s.u).stride(1),
            s.B.stride(1), s.C.stride(1), s.length, s.channels, s.states - first, s.states * s.channels,
            s.segment_chunks, GATED=final and z is not None, STATE=state is not None, KEEP=keep, **constants)
    return out, last.transpose(1, 2), entries


def scan_backward(grad_out: Tensor, grad_last: Tensor | None, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
                  D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, documents: Tensor | None, entries: Tensor,
                  want_out: bool = False, grad_z: Tensor | None = None) -> tuple[Tensor, ...]:
    """The gradients of u, dt, A, B, C, D, z, dt_bias and the initial state; and with want_out y again, as it was given.
    Those of z and y are empty where there is none. grad_z: where to write that of z."""
    s, grad_last = _Scan("scan_backward", u, dt, A, B, C, D, z, dt_bias, documents), _columns(grad_last)
    grad_out, (blocks, segments, batch) = _rows(grad_out), s.grid
    grad_u, grad_dt, out = u.new_empty(u.shape), dt.new_empty(u.shape), u.new_empty(u.shape if want_out else (0, 0, 0))
    grad_z = u.new_empty((0, 0, 0) if z is None else u.shape) if grad_z is None else grad_z
    grad_A, grad_state = s.new(batch, segments, s.states, s.channels), s.new(batch, s.states, s.channels)
    grad_D, grad_bias = (s.new(batch, segments, s.channels) for _ in range(2))
    grad_B, grad_C = (s.new(blocks, batch, s.length, s.states) for _ in range(2))
    partial = s.new((3, *u.shape) if s.states > STATES else 0)
    scratch = s.new(batch * segments * blocks, CHUNK * (STATES // 2 + 1) * s.sizes["CHANNELS"])
    for kernels, first, final, constants, ends, totals in s.launches(grad_out, s.z, s.C, True):
        kernels.backward[s.grid](
            grad_out, _or(grad_last, grad_state)[:, first:], s.u, s.dt, s.A[first:], s.B[..., first:], s.C[..., first:],
            s.D, _or(s.z, s.u), s.bias, _or(s.documents, s.u), entries[:, :, first:], ends, totals, partial, scratch,
            grad_u, grad_dt, grad_A[:, :, first:], grad_B[..., first:], grad_C[..., first:], grad_D, grad_z, grad_bias,
            grad_state[:, first:], out, grad_out.stride(1), s.u.stride(1), s.dt.stride(1), _or(s.z, s.u).stride(1),
            s.B.stride(1), s.C.stride(1), grad_z.stride(1), s.states, s.length, s.channels, s.states - first,
            s.states * s.channels, u.numel(), s.segment_chunks, LAST=final, GATED=z is not None,
            STATE=grad_last is not None, WITH_OUT=want_out, **constants)
    return (grad_u, grad_dt, grad_A.sum((0, 1)).T, grad_B.sum(0).to(B.dtype), grad_C.sum(0).to(C.dtype),
            grad_D.sum((0, 1)), grad_z, grad_bias.sum((0, 1)), grad_state.transpose(1, 2), out)


class _Gradient(Function):
    @staticmethod
    def forward(ctx, *inputs):
        with triton.below_autograd():
            out, last, entries = _forward(*inputs)
        *kept, state, _ = inputs
        ctx.save_for_backward(*kept, entries)
        ctx.has_state = state is not None
        ctx.mark_non_differentiable(entries)
        ctx.set_materialize_grads(False)
        return out, last, entries

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_last, _):
        u, *others = ctx.saved_tensors
        *grads, grad_state, _ = _backward(torch.zeros_like(u) if grad_out is None else grad_out, grad_last, u, *others)
        grads = (None if v is None else grad.to(v.dtype) for grad, v in zip(grads, (u, *others)))
        return *grads, None, grad_state if ctx.has_state else None, None


_forward = triton.operator(
    "scan_forward(Tensor u, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "Tensor? documents, Tensor? state, bool keep) -> (Tensor, Tensor, Tensor)", scan_forward, scan_forward, _Gradient)
_backward = triton.operator(
    "scan_backward(Tensor grad_out, Tensor? grad_last, Tensor u, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
    "Tensor? z, Tensor? dt_bias, Tensor? documents, Tensor entries) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", scan_backward, scan_backward)


def selective_scan(*inputs_and_options):
    *inputs, return_last_state = inputs_and_options
    out, last, _ = _forward(*inputs, torch.is_grad_enabled())
    return (out, last) if return_last_state else out
