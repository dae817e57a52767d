"""Computes SSD in plain PyTorch. Only the inputs are kept; the backward pass recomputes decays and states. Heads of a
group share B and C, so that each product with B or C is one wide matrix product for each chunk and group, with the
decays multiplied into x.

Decays are computed as powers of two: on a CPU, exp2 is several times faster than exp and does not slow down if it
underflows. The exponents are differences of sums in float64, so that a huge dt elsewhere in the chunk costs no digits.
The sums restart at every document, so that no document affects another, not even by rounding.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mamba_fsdp.conventions import compute_type

# Positions of a chunk in this backend. Larger chunks need more decays, smaller ones more states.
CHUNK = 64


def in_chunks(t: Tensor, size: int) -> Tensor:
    """Returns t (batch, length, ...) as (batch, chunks, size, ...), padded with zeros."""
    missing = -t.shape[1] % size
    if missing:
        t = torch.cat([t, t.new_zeros(t.shape[0], missing, *t.shape[2:])], dim=1)
    return t.unflatten(1, (-1, size))


def running_sums(values: Tensor, seq_idx: Tensor | None = None) -> Tensor:
    """Returns, for each position, the sum of `values` over the positions of its document up to this position.

    values (..., positions, channels); seq_idx (..., positions), or None if all positions are in one document."""
    # cumsum raises an error on a GPU in a deterministic run. A deterministic run on a CPU takes the same path.
    if seq_idx is None and not torch.are_deterministic_algorithms_enabled():
        return values.cumsum(-2)
    shift = 1
    # After the round with this `shift`, `values` contains the sums over the last 2 * shift positions.
    while shift < values.shape[-2]:
        earlier = values[..., :-shift, :]
        if seq_idx is not None:
            is_same = seq_idx[..., shift:] == seq_idx[..., :-shift]
            earlier = torch.where(is_same.unsqueeze(-1), earlier, 0)
        values = values + F.pad(earlier, (0, 0, shift, 0))
        shift *= 2
    return values


def decays(delta: Tensor, A: Tensor, seq_idx: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the decays of a state: from position j to position i of a chunk, (batch, chunks, heads, i, j); from the
    previous chunk's end to i, and from j to the chunk's end, both (batch, chunks, size, heads).

    A decay is 0 if a document starts in between, or if j is after i. delta (batch, chunks, size, heads); seq_idx
    (batch, chunks, size) or None.
    """
    size = delta.shape[2]
    real = delta.dtype
    powers = running_sums(delta.double() * (A.double() / math.log(2)), seq_idx)
    by_head = powers.transpose(2, 3)
    within = (by_head.unsqueeze(4) - by_head.unsqueeze(3)).to(real)
    within += torch.full((size, size), -torch.inf, dtype=real, device=delta.device).triu(1)
    from_start = powers.to(real)
    to_end = (powers[:, :, -1:] - powers).to(real)
    if seq_idx is not None:
        before = torch.cat([seq_idx[:, :1, 0], seq_idx[:, :-1, -1]], dim=1).unsqueeze(2)
        within.masked_fill_((seq_idx.unsqueeze(3) != seq_idx.unsqueeze(2)).unsqueeze(2), -torch.inf)
        from_start.masked_fill_((seq_idx != before).unsqueeze(3), -torch.inf)
        to_end.masked_fill_((seq_idx != seq_idx[:, :, -1:]).unsqueeze(3), -torch.inf)
    return within.exp2_(), from_start.exp2_(), to_end.exp2_()


def _hand_over(
    added: Tensor, decay: Tensor, state: Tensor, order: Iterable[int]
) -> tuple[Tensor, Tensor]:
    """Returns the state entering each chunk, and the last state. Through each chunk, in the given order, the state is
    multiplied by the chunk's `decay`, and `added` is added.

    added (batch, chunks, groups, d_state, channels); decay (batch, chunks, groups, 1, channels).
    """
    entering = [None] * added.shape[1]
    for chunk in (
        order
    ):  # a list, because a compiled graph copies a whole tensor at every assignment to a part of it
        entering[chunk] = state
        state = torch.addcmul(added[:, chunk], state, decay[:, chunk])
    return torch.stack(entering, dim=1), state


def _states(
    x: Tensor, delta: Tensor, B: Tensor, from_start: Tensor, to_end: Tensor, state: Tensor
) -> tuple[Tensor, ...]:
    """Returns x multiplied by its weight in the chunk's last state, the decay over each chunk, and the two results of
    _hand_over: the state entering each chunk, and the last state."""
    groups = B.shape[3]
    scaled = (x * (delta * to_end).unsqueeze(4)).flatten(3).unflatten(3, (groups, -1))
    decay = from_start[:, :, -1].repeat_interleave(x.shape[4], 2).unflatten(2, (groups, 1, -1))
    added = torch.einsum("zcjgn,zcjgk->zcgnk", B, scaled)
    return scaled, decay, *_hand_over(added, decay, state, range(added.shape[1]))


class _SSD(torch.autograd.Function):
    """SSD with its gradients. x (batch, length, heads, headdim), B and C are of any dtype. delta (batch, length, heads)
    after softplus, A, D and state (batch, groups, d_state, channels of a group) are in compute type. seq_idx is (batch,
    chunks, size).

    Indices: z row, c chunk, i and j positions of a chunk, h head, p channel of a head, g group, k channel of a group, n
    state.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        seq_idx: Tensor | None,
        state: Tensor,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, delta, A, B, C, D, seq_idx, state)
        ctx.size = size
        x_, delta_, B_, C_ = (in_chunks(t, size).to(delta.dtype) for t in (x, delta, B, C))
        within, from_start, to_end = decays(delta_, A, seq_idx)

        _, _, entering, last = _states(x_, delta_, B_, from_start, to_end, state)
        y = torch.einsum("zcign,zcgnk->zcigk", C_, entering).flatten(3).unflatten(3, x.shape[2:])
        y *= from_start.unsqueeze(4)

        CB = torch.einsum("zcign,zcjgn->zcgij", C_, B_).unsqueeze(3)
        within = within.unflatten(2, (B.shape[2], -1)).mul_(CB).flatten(2, 3)
        y += torch.einsum("zchij,zcjhp->zcihp", within, x_ * delta_.unsqueeze(4))
        return y.addcmul_(x_, D.unsqueeze(1)).flatten(1, 2)[:, : x.shape[1]].to(x.dtype), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        x, delta, A, B, C, D, seq_idx, state = ctx.saved_tensors
        x_, delta_, B_, C_, grad_ = (
            in_chunks(t, ctx.size).to(delta.dtype) for t in (x, delta, B, C, grad)
        )
        within, from_start, to_end = decays(delta_, A, seq_idx)
        by_head = x.shape[2:]
        by_group = (B.shape[2], -1)

        # Between chunks. `leaving` is the gradient of the state after each chunk, `entering` the state before it.
        scaled, decay, entering, _ = _states(x_, delta_, B_, from_start, to_end, state)
        reading = (grad_ * from_start.unsqueeze(4)).flatten(3).unflatten(3, by_group)
        leaving = torch.einsum("zcign,zcigk->zcgnk", C_, reading)
        leaving, grad_state = _hand_over(
            leaving, decay, grad_last, range(leaving.shape[1] - 1, -1, -1)
        )
        grad_C = torch.einsum("zcigk,zcgnk->zcign", reading, entering)
        grad_B = torch.einsum("zcjgk,zcgnk->zcjgn", scaled, leaving)
        read = torch.einsum("zcign,zcgnk->zcigk", C_, entering)
        grad_from_start = (read * reading).flatten(3).unflatten(3, by_head).sum(4)
        grad_input = torch.einsum("zcjgn,zcgnk->zcjgk", B_, leaving)
        grad_to_end = (grad_input * scaled).flatten(3).unflatten(3, by_head).sum(4)
        grad_input = grad_input.flatten(3).unflatten(3, by_head) * to_end.unsqueeze(4)
        grad_decay = (entering * leaving).mul_(decay).sum(3).flatten(2).unflatten(2, by_head).sum(3)

        # Within chunks.
        CB = torch.einsum("zcign,zcjgn->zcgij", C_, B_).unsqueeze(3)
        grad_within = torch.einsum("zcihp,zcjhp->zchij", grad_, x_ * delta_.unsqueeze(4)).mul_(
            within
        )
        grad_within = grad_within.unflatten(2, by_group)
        grad_CB = grad_within.sum(3)
        grad_C += torch.einsum("zcgij,zcjgn->zcign", grad_CB, B_)
        grad_B += torch.einsum("zcgij,zcign->zcjgn", grad_CB, C_)
        grad_within = grad_within.mul_(CB).flatten(2, 3)
        within = within.unflatten(2, by_group).mul_(CB).flatten(2, 3)
        grad_input += torch.einsum("zchij,zcihp->zcjhp", within, grad_)

        # The exponent of the decay from position j to i is the sum of delta[t] A with j < t <= i.
        grad_within.diagonal(dim1=3, dim2=4).zero_()
        passing = (grad_within.sum(4) - grad_within.sum(3)).transpose(2, 3) + grad_from_start
        backwards = None if seq_idx is None else seq_idx.flip(2)
        passing = running_sums(passing.flip(2), backwards).flip(2)
        passing += (running_sums(grad_to_end) - grad_to_end) + grad_decay.unsqueeze(2)
        grad_delta = (grad_input * x_).sum(4).addcmul_(passing, A)
        grad_A = (passing * delta_).sum((0, 1, 2))
        grad_D = (grad_ * x_).sum(4).sum((0, 1, 2))
        grad_x = grad_input.mul_(delta_.unsqueeze(4)).addcmul_(grad_, D.unsqueeze(1))
        grad_x, grad_delta, grad_B, grad_C = (
            g.flatten(1, 2)[:, : x.shape[1]].to(t.dtype)
            for g, t in ((grad_x, x), (grad_delta, delta), (grad_B, B), (grad_C, C))
        )
        return grad_x, grad_delta, grad_A, grad_B, grad_C, grad_D, None, grad_state, None


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None,
    initial_state: Tensor | None,
    return_last_state: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    batch, length, heads, headdim = x.shape
    real = compute_type(x)
    size = min(chunk_size, CHUNK)
    if length == 1:
        size = 1  # a single token, as in generation, is not padded
    delta = F.softplus(dt.to(real) + dt_bias.to(real))
    if seq_idx is not None:
        padding = seq_idx[:, -1:].expand(-1, -length % size)
        seq_idx = torch.cat([seq_idx, padding], dim=1).unflatten(1, (-1, size))
    if initial_state is None:
        initial_state = x.new_zeros(batch, heads, headdim, B.shape[3])
    state = initial_state.to(real).unflatten(1, (B.shape[2], -1)).flatten(2, 3).transpose(2, 3)
    y, last = _SSD.apply(x, delta, A.to(real), B, C, D.to(real), seq_idx, state, size)
    if not return_last_state:
        return y
    return y, last.transpose(2, 3).unflatten(2, (-1, headdim)).flatten(1, 2)
