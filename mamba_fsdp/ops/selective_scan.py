"""Mamba-1's selective scan, and the whole mixer around it.

With delta = softplus(dt + dt_bias), for every channel and each of its d_state states:

    h[t] = exp(delta[t] A) h[t-1] + delta[t] B[t] u[t]
    y[t] = (C[t] . h[t] + D u[t]) * silu(z[t])

Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces (2023), section 3. The portable form
walks the sequence in chunks. Inside a chunk each position is one in-place multiply-add on a (batch, d_state, d_inner)
slab; only the state at each chunk's entry is kept, and the backward pass recomputes one chunk at a time, last one first.
(A closed form with exp of a cumulative sum overflows at sizes of dt that training meets.)
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from mamba_fsdp.ops import native
from mamba_fsdp.ops.causal_conv import causal_conv_silu
from mamba_fsdp.ops.kernels import compute_type

CHUNK = 16  # positions; the working set is three (CHUNK, batch, d_state, d_inner) buffers, the kept states 1 / CHUNK of one


def _document_starts(documents):
    """True where a position begins a document that is not the row's first: (batch, length)."""
    starts = torch.zeros_like(documents, dtype=torch.bool)
    torch.ne(documents[:, 1:], documents[:, :-1], out=starts[:, 1:])
    return starts


class _Chunk:
    """The arithmetic of one chunk, time first: buffers are (steps, batch, d_state, d_inner)."""

    def __init__(self, piece, u, dt, A, B, C, dt_bias, starts):
        real = A.dtype
        self.raw_delta = dt[:, piece].to(real)
        if dt_bias is not None:
            self.raw_delta = self.raw_delta + dt_bias
        self.delta = F.softplus(self.raw_delta)  # (batch, steps, d_inner), as u and input
        self.u = u[:, piece].to(real)
        self.input = self.delta * self.u
        self.B, self.C = (matrix[:, piece].to(real).transpose(0, 1).contiguous() for matrix in (B, C))
        self.steps, batch, d_state = self.B.shape
        self.shape = (self.steps, batch, d_state, self.u.shape[2])
        self.decay = self.outer(self.delta, A).exp_()
        if starts is not None:
            self.decay.masked_fill_(starts[:, piece].T[:, :, None, None], 0.0)

    def outer(self, channels, states):
        """Slabs of channels (batch, steps, d_inner) * states (broadcast to d_state before d_inner)."""
        # Into a buffer of our own: left to itself, mul lays its result out as `channels`, and no step is contiguous.
        return torch.mul(channels.transpose(0, 1).unsqueeze(2), states, out=states.new_empty(self.shape))

    def states(self, entry):
        """The state after each position, from the state before the first: (steps, batch, d_state, d_inner)."""
        states = self.outer(self.input, self.B.unsqueeze(3))
        before = entry
        for step in range(self.steps):
            before = states[step].addcmul_(before, self.decay[step])
        return states

    def adjoints(self, grad_y, grad_exit):
        """Gradient of the state after each position, from that of y and what reaches the last state from behind."""
        adjoints = self.outer(grad_y, self.C.unsqueeze(3))
        behind = adjoints[-1].add_(grad_exit)
        for step in range(self.steps - 2, -1, -1):
            behind = adjoints[step].addcmul_(behind, self.decay[step + 1])
        return adjoints

    def over_states(self, rows, slabs):
        """sum over d_state of rows (steps, batch, d_state) * slabs: (batch, steps, d_inner)."""
        steps, batch, d_state, d_inner = slabs.shape
        product = torch.bmm(rows.reshape(-1, 1, d_state), slabs.reshape(-1, d_state, d_inner))
        return product.view(steps, batch, d_inner).transpose(0, 1)

    def over_channels(self, slabs, channels):
        """sum over d_inner of slabs * channels (batch, steps, d_inner): (batch, steps, d_state)."""
        steps, batch, d_state, d_inner = slabs.shape
        columns = channels.transpose(0, 1).reshape(-1, d_inner, 1)
        return torch.bmm(slabs.view(-1, d_state, d_inner), columns).view(steps, batch, d_state).transpose(0, 1)


def _chunks(length):
    return [slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]


class _PortableScan(torch.autograd.Function):
    """States inside are (batch, d_state, d_inner): the long dimension last."""

    @staticmethod
    def forward(ctx, u, dt, A, B, C, D, z, dt_bias, starts, initial_state):
        batch, length, d_inner = u.shape
        real = compute_type(u)
        A_rows = A.T.to(real).contiguous()
        bias = None if dt_bias is None else dt_bias.to(real)
        state = initial_state.transpose(1, 2).to(real, copy=True, memory_format=torch.contiguous_format)
        out = torch.empty_like(u, memory_format=torch.contiguous_format)
        entries = state.new_empty(len(_chunks(length)), *state.shape)
        for entry, piece in zip(entries, _chunks(length)):
            entry.copy_(state)
            chunk = _Chunk(piece, u, dt, A_rows, B, C, bias, starts)
            states = chunk.states(entry)
            y = chunk.over_states(chunk.C, states)
            if D is not None:
                y = torch.addcmul(y, chunk.u, D.to(real))
            if z is not None:
                y = y * F.silu(z[:, piece].to(real))
            out[:, piece] = y
            state = states[-1].clone()
        ctx.save_for_backward(u, dt, A, B, C, D, z, dt_bias, starts, entries)
        ctx.state_type = initial_state.dtype
        return out, state.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_last_state):
        u, dt, A, B, C, D, z, dt_bias, starts, entries = ctx.saved_tensors
        real = entries.dtype
        A_rows = A.T.to(real).contiguous()
        bias = None if dt_bias is None else dt_bias.to(real)
        grad_u, grad_dt, grad_B, grad_C = (torch.empty_like(v, memory_format=torch.contiguous_format) for v in (u, dt, B, C))
        grad_z = None if z is None else torch.empty_like(z, memory_format=torch.contiguous_format)
        grad_A = torch.zeros_like(A_rows)
        grad_D = None if D is None else torch.zeros_like(D, dtype=real)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        carried = grad_last_state.transpose(1, 2).to(real)  # what reaches the chunk's last state from behind
        for entry, piece in reversed(list(zip(entries, _chunks(u.shape[1])))):
            chunk = _Chunk(piece, u, dt, A_rows, B, C, bias, starts)
            states = chunk.states(entry)
            grad_y = grad_out[:, piece].to(real)
            if z is not None:
                y = chunk.over_states(chunk.C, states)
                if D is not None:
                    y = torch.addcmul(y, chunk.u, D.to(real))
                gate_input = z[:, piece].to(real)
                sigmoid = torch.sigmoid(gate_input)
                grad_z[:, piece] = y.mul_(grad_y).mul_(sigmoid).mul_(1 + gate_input * (1 - sigmoid))
                grad_y = grad_y * (gate_input * sigmoid)
            adjoints = chunk.adjoints(grad_y, carried)
            grad_C[:, piece] = chunk.over_channels(states, grad_y)
            grad_B[:, piece] = chunk.over_channels(adjoints, chunk.input)
            grad_input = chunk.over_states(chunk.B, adjoints)
            carried = adjoints[0] * chunk.decay[0]
            # delta acts through the decay: its gradient is adjoint * previous state * decay * A, and A's the same * delta.
            through_decay = chunk.decay.mul_(adjoints)
            through_decay[0].mul_(entry)
            through_decay[1:].mul_(states[:-1])
            grad_A += torch.mul(through_decay, chunk.delta.transpose(0, 1).unsqueeze(2), out=states).sum((0, 1))
            grad_delta = through_decay.mul_(A_rows).sum(2).transpose(0, 1)
            grad_delta = grad_delta.addcmul_(grad_input, chunk.u)
            grad_dt[:, piece] = grad_delta.mul_(torch.sigmoid(chunk.raw_delta))
            if bias is not None:
                grad_bias += grad_delta.sum((0, 1))
            grad_input = grad_input.mul_(chunk.delta)
            if D is not None:
                grad_input.addcmul_(grad_y, D.to(real))
                grad_D += torch.einsum("btc,btc->c", grad_y, chunk.u)
            grad_u[:, piece] = grad_input
        return (grad_u, grad_dt, grad_A.T.to(A.dtype), grad_B, grad_C, None if D is None else grad_D.to(D.dtype), grad_z,
                None if bias is None else grad_bias.to(dt_bias.dtype), None, carried.transpose(1, 2).to(ctx.state_type))


_SCAN = native.structure(
    "Scan", "n:threads", "n:batch", "n:length", "n:d_inner", "n:d_state", "n:u_row", "n:dt_row", "n:B_row", "n:C_row",
    "n:z_row", "n:grad_row", "u", "dt", "B", "C", "z", "A", "D", "bias", "starts", "out", "entries", "state", "grad_out",
    "grad_state", "grad_u", "grad_dt", "grad_z", "grad_B", "grad_C", "grad_A", "grad_D", "grad_bias")


def _native_arguments(u, dt, A_rows, B, C, D, z, bias, starts, **more):
    batch, length, d_inner = u.shape
    rows = {f"{name}_row": value.stride(1) for name, value in (("u", u), ("dt", dt), ("B", B), ("C", C))}
    pointers = {"u": u, "dt": dt, "A": A_rows, "B": B, "C": C, "D": D, "z": z, "bias": bias, "starts": starts}
    return _SCAN(threads=torch.get_num_threads(), batch=batch, length=length, d_inner=d_inner, d_state=A_rows.shape[0],
                 z_row=0 if z is None else z.stride(1), **rows, **more,
                 **{name: native.pointer(value) for name, value in pointers.items()})


class _NativeScan(torch.autograd.Function):
    """The C form, selective_scan.c. Activations share one dtype of native.TYPES."""

    @staticmethod
    def forward(ctx, u, dt, A, B, C, D, z, dt_bias, starts, initial_state):
        real = compute_type(u)
        u, dt, B, C, z = (native.as_rows(value) for value in (u, dt, B, C, z))
        A_rows = A.T.to(real).contiguous()
        D_real, bias = (None if v is None else v.to(real).contiguous() for v in (D, dt_bias))
        batch, length, d_inner = u.shape
        library = native.library(u.dtype)
        out = u.new_empty(u.shape)
        state = initial_state.transpose(1, 2).to(real, copy=True, memory_format=torch.contiguous_format)
        entries = state.new_empty(batch, -(-length // library.scan_steps()), *A_rows.shape)
        native.call(library.scan_forward, _native_arguments(
            u, dt, A_rows, B, C, D_real, z, bias, starts, out=native.pointer(out), entries=native.pointer(entries),
            state=native.pointer(state)))
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
        results = {"grad_out": grad_out, "grad_state": grad_state, "grad_u": grad_u, "grad_dt": grad_dt, "grad_z": grad_z,
                   "grad_B": grad_B, "grad_C": grad_C, "grad_A": grad_A, "grad_D": grad_D, "grad_bias": grad_bias}
        native.call(library.scan_backward, _native_arguments(
            u, dt, A_rows, B, C, D, z, bias, starts, entries=native.pointer(entries), grad_row=grad_out.stride(1),
            **{name: native.pointer(value) for name, value in results.items()}))
        A_type, D_type, bias_type, state_type = ctx.dtypes
        return (grad_u, grad_dt, grad_A.sum(0).T.to(A_type), grad_B.sum(0).to(B.dtype), grad_C.sum(0).to(C.dtype),
                None if D is None else grad_D.sum(0).to(D_type), grad_z, None if bias is None else grad_bias.sum(0).to(bias_type),
                None, grad_state.transpose(1, 2).to(state_type))


@torch.compiler.disable
def _apply(function, *arguments):
    return function.apply(*arguments)


def _fused(u, dt, A, B, C, D, z, dt_bias, return_last_state):
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    u, dt, B, C, z = (None if value is None else value.transpose(1, 2).contiguous() for value in (u, dt, B, C, z))
    A, D, dt_bias = (None if value is None else value.float() for value in (A, D, dt_bias))
    out = selective_scan_fn(u, dt, A, B, C, D, z, dt_bias, delta_softplus=True, return_last_state=return_last_state)
    return (out[0].transpose(1, 2), out[1]) if return_last_state else out.transpose(1, 2)


def selective_scan(u, dt, A, B, C, D=None, z=None, dt_bias=None, *, documents=None, initial_state=None,
                   return_last_state=False, kernels="portable"):
    """y (batch, length, d_inner) in u's dtype, or (y, last state) with return_last_state.

    u, dt, z (batch, length, d_inner); dt is before its bias and softplus; A (d_inner, d_state), negative; B, C (batch,
    length, d_state); D, dt_bias (d_inner); a state is (batch, d_inner, d_state), in float32.
    documents: (batch, length) document index of each position; the state is reset where it changes. mamba-ssm's kernel
    has neither that nor an initial state: with either, `fused` runs the portable form.
    """
    if kernels == "fused" and documents is None and initial_state is None and not (
            return_last_state and torch.is_grad_enabled()):  # mamba-ssm's scan has no gradient through its last state
        return _fused(u, dt, A, B, C, D, z, dt_bias, return_last_state)
    starts = None if documents is None else _document_starts(documents)
    if initial_state is None:
        initial_state = A.new_zeros(u.shape[0], *A.shape, dtype=compute_type(u))
    use_native = kernels == "native" and native.takes(u, dt, B, C, z)
    out, last_state = _apply(_NativeScan if use_native else _PortableScan, u, dt, A, B, C, D, z, dt_bias, starts, initial_state)
    return (out, last_state) if return_last_state else out


def selective_scan_step(state, u, dt, A, B, C, D=None, z=None, dt_bias=None):
    """One position of selective_scan: u, dt, z (batch, d_inner), B, C (batch, d_state) -> (batch, d_inner).

    state (batch, d_inner, d_state) is updated in place.
    """
    real = compute_type(u)
    values, delta, B, C = (v.to(real) for v in (u, dt, B, C))
    delta = F.softplus(delta if dt_bias is None else delta + dt_bias)
    state.mul_(torch.exp(delta.unsqueeze(2) * A)).addcmul_((delta * values).unsqueeze(2), B.unsqueeze(1))
    y = torch.einsum("bds,bs->bd", state.to(real), C)
    if D is not None:
        y = y + D * values
    if z is not None:
        y = y * F.silu(z.to(real))
    return y.to(u.dtype)


def mamba1_inner(xz, conv_weight, conv_bias, x_proj_weight, dt_proj_weight, dt_bias, A, D, out_proj_weight, *,
                 documents=None, kernels="portable"):
    """The mixer behind its input projection: xz (batch, length, 2 d_inner), halves [x, z] -> (batch, length, d_model).

    conv_weight (d_inner, 1, width), conv_bias (d_inner); x_proj_weight (dt_rank + 2 d_state, d_inner), rows [dt, B, C];
    dt_proj_weight (d_inner, dt_rank), its bias dt_bias (d_inner); A (d_inner, d_state), D (d_inner); out_proj_weight
    (d_model, d_inner). Projections run in xz's dtype.
    """
    if kernels == "fused" and documents is None:
        from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn

        weights = (weight.to(xz.dtype) for weight in (conv_weight, conv_bias, x_proj_weight, dt_proj_weight, out_proj_weight))
        return mamba_inner_fn(xz.transpose(1, 2).contiguous(), *weights, None, A.float(), D=D.float(),
                              delta_bias=dt_bias.float(), delta_softplus=True)
    dt_rank, d_state = dt_proj_weight.shape[1], A.shape[1]
    x, z = xz.chunk(2, dim=-1)
    x = causal_conv_silu(x, conv_weight, conv_bias, documents=documents, kernels=kernels)
    dt, B, C = F.linear(x, x_proj_weight.to(x.dtype)).split([dt_rank, d_state, d_state], dim=-1)
    dt = F.linear(dt, dt_proj_weight.to(dt.dtype))
    y = selective_scan(x, dt, A, B, C, D, z, dt_bias, documents=documents, kernels=kernels)
    return F.linear(y, out_proj_weight.to(y.dtype))
