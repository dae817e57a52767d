"""Computes the selective scan in plain PyTorch.

The sequence is computed in chunks. Inside a chunk, each position is one in-place multiply-add on a (batch, d_state,
d_inner) slab. Only the state before each chunk is kept; the backward pass recomputes one chunk at a time, beginning with
the last one. A closed form with exp of a cumulative sum would overflow at values of dt that occur in training.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mamba_fsdp.conventions import compute_type

# Positions of a chunk. Three (CHUNK, batch, d_state, d_inner) buffers are in use at a time.
CHUNK = 16


class _Chunk:
    """The arithmetic of one chunk. Its buffers have time as the first dimension: (steps, batch, d_state, d_inner)."""

    def __init__(
        self,
        span: slice,
        u: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        dt_bias: Tensor,
        starts: Tensor | None,
    ) -> None:
        real = A.dtype
        self.raw_delta = dt[:, span].to(real) + dt_bias
        self.delta = F.softplus(self.raw_delta)  # (batch, steps, d_inner), like u and input
        self.u = u[:, span].to(real)
        self.input = self.delta * self.u
        self.B, self.C = (
            matrix[:, span].to(real).transpose(0, 1).contiguous() for matrix in (B, C)
        )
        self.shape = (*self.B.shape, self.u.shape[2])
        self.decay = self.outer(self.delta, A).exp_()
        if starts is not None:
            self.decay.masked_fill_(starts[:, span].T[:, :, None, None], 0.0)

    def outer(self, channels: Tensor, states: Tensor) -> Tensor:
        """Returns channels (batch, steps, d_inner) times states, a tensor that broadcasts to (d_state, d_inner), as one slab
        for each step."""
        # Without `out`, mul would give its result the layout of `channels`, in which steps are not contiguous.
        return torch.mul(
            channels.transpose(0, 1).unsqueeze(2), states, out=states.new_empty(self.shape)
        )

    def states(self, entry: Tensor) -> Tensor:
        """Returns the state after each position, (steps, batch, d_state, d_inner). entry: the state before the first
        position."""
        states = self.outer(self.input, self.B.unsqueeze(3))
        for state, decay in zip(states, self.decay):
            entry = state.addcmul_(entry, decay)
        return states

    def adjoints(self, grad_y: Tensor, grad_exit: Tensor) -> Tensor:
        """Returns the gradient of the state after each position, (steps, batch, d_state, d_inner).

        grad_y: the gradient of y before the gate. grad_exit: the gradient of the last state through later chunks."""
        adjoints = self.outer(grad_y, self.C.unsqueeze(3))
        behind = adjoints[-1].add_(grad_exit)
        for step in range(len(adjoints) - 2, -1, -1):
            behind = adjoints[step].addcmul_(behind, self.decay[step + 1])
        return adjoints

    def over_states(self, rows: Tensor, slabs: Tensor) -> Tensor:
        """Returns the sum over d_state of rows * slabs, with the shape (batch, steps, d_inner).

        rows: (steps, batch, d_state). slabs: (steps, batch, d_state, d_inner)."""
        steps, batch, d_state, d_inner = slabs.shape
        product = torch.bmm(rows.reshape(-1, 1, d_state), slabs.reshape(-1, d_state, d_inner))
        return product.view(steps, batch, d_inner).transpose(0, 1)

    def over_channels(self, slabs: Tensor, channels: Tensor) -> Tensor:
        """Returns the sum over d_inner of slabs * channels, with the shape (batch, steps, d_state).

        slabs: (steps, batch, d_state, d_inner). channels: (batch, steps, d_inner)."""
        steps, batch, d_state, d_inner = slabs.shape
        columns = channels.transpose(0, 1).reshape(-1, d_inner, 1)
        return (
            torch.bmm(slabs.view(-1, d_state, d_inner), columns)
            .view(steps, batch, d_state)
            .transpose(0, 1)
        )


def _chunks(length: int) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, length, CHUNK)]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        u, dt, A, B, C, D, z, dt_bias, starts, state = inputs
        out = torch.empty_like(u, memory_format=torch.contiguous_format)
        spans = _chunks(u.shape[1])
        entries = state.new_empty(len(spans), *state.shape)
        for entry, span in zip(entries, spans):
            entry.copy_(state)
            chunk = _Chunk(span, u, dt, A, B, C, dt_bias, starts)
            states = chunk.states(entry)
            y = torch.addcmul(chunk.over_states(chunk.C, states), chunk.u, D)
            out[:, span] = y * F.silu(z[:, span].to(y.dtype))
            state = states[-1].clone()
        ctx.save_for_backward(u, dt, A, B, C, D, z, dt_bias, starts, entries)
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_last_state: Tensor) -> tuple[Tensor | None, ...]:
        u, dt, A, B, C, D, z, dt_bias, starts, entries = ctx.saved_tensors
        grad_u, grad_dt, grad_B, grad_C, grad_z = (
            torch.empty_like(v, memory_format=torch.contiguous_format) for v in (u, dt, B, C, z)
        )
        grad_A, grad_D, grad_bias = (torch.zeros_like(v) for v in (A, D, dt_bias))
        carried = grad_last_state  # the gradient of the chunk's last state through later chunks
        for entry, span in reversed(list(zip(entries, _chunks(u.shape[1])))):
            chunk = _Chunk(span, u, dt, A, B, C, dt_bias, starts)
            states = chunk.states(entry)
            grad_y = grad_out[:, span].to(A.dtype)
            y = torch.addcmul(chunk.over_states(chunk.C, states), chunk.u, D)
            gate_input = z[:, span].to(A.dtype)
            sigmoid = torch.sigmoid(gate_input)
            grad_z[:, span] = y.mul_(grad_y).mul_(sigmoid).mul_(1 + gate_input * (1 - sigmoid))
            grad_y = grad_y * (gate_input * sigmoid)
            adjoints = chunk.adjoints(grad_y, carried)
            grad_C[:, span] = chunk.over_channels(states, grad_y)
            grad_B[:, span] = chunk.over_channels(adjoints, chunk.input)
            grad_input = chunk.over_states(chunk.B, adjoints)
            carried = adjoints[0] * chunk.decay[0]
            # Through the decay, the gradient of delta is adjoint * previous state * decay * A. In the gradient of A, the
            # last factor is delta instead of A.
            through_decay = chunk.decay.mul_(adjoints)
            through_decay[0].mul_(entry)
            through_decay[1:].mul_(states[:-1])
            grad_A += torch.mul(
                through_decay, chunk.delta.transpose(0, 1).unsqueeze(2), out=states
            ).sum((0, 1))
            grad_delta = through_decay.mul_(A).sum(2).transpose(0, 1).addcmul_(grad_input, chunk.u)
            grad_dt[:, span] = grad_delta.mul_(torch.sigmoid(chunk.raw_delta))
            grad_bias += grad_delta.sum((0, 1))
            grad_u[:, span] = grad_input.mul_(chunk.delta).addcmul_(grad_y, D)
            grad_D += torch.einsum("btc,btc->c", grad_y, chunk.u)
        return grad_u, grad_dt, grad_A, grad_B, grad_C, grad_D, grad_z, grad_bias, None, carried


def apply(
    function: type[torch.autograd.Function],
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    dt_bias: Tensor,
    seq_idx: Tensor | None,
    initial_state: Tensor | None,
    return_last_state: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns the result of selective_scan, computed by `function`, an autograd function.

    The function takes A, D, dt_bias and the state in compute type. d_inner, the long dimension, is the last one of A and
    of states. Instead of seq_idx, the function takes `starts` (batch, length): True where a document starts, except at the
    first position of a row.
    """
    A = A.T.to(compute_type(u)).contiguous()
    D = D.to(A.dtype).contiguous()
    dt_bias = dt_bias.to(A.dtype).contiguous()
    starts = None
    if seq_idx is not None:
        starts = seq_idx.diff(dim=1, prepend=seq_idx[:, :1]) != 0
    if initial_state is None:
        state = A.new_zeros(u.shape[0], *A.shape)
    else:
        state = initial_state.transpose(1, 2).to(A.dtype).contiguous()
    out, state = function.apply(u, dt, A, B, C, D, z, dt_bias, starts, state)
    return (out, state.transpose(1, 2)) if return_last_state else out


selective_scan = partial(apply, _Scan)
