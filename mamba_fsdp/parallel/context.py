"""Splits each sequence over neighbouring ranks (context parallelism). The ranks exchange what recurrences,
convolutions and attention need from earlier positions.

Every rank of a group has `length` positions, in the order of ranks. Three exchanges serve all layers, forward and
backward:

    inputs_before    the last inputs of the previous rank, for the convolution
    entering_state   the state after the positions of all earlier ranks, for the recurrence
    whole_sequence   all positions of all ranks, for attention's keys and values

All ranks of a group make the same calls in the same order, in their backward passes too.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mamba_fsdp.parallel.compat import gather_into, scatter_sum
from mamba_fsdp.parallel.world import World


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share each sequence. rank: this rank's place in the group."""

    rank: int
    size: int
    group: dist.ProcessGroup
    device: torch.device

    @classmethod
    def of(cls, world: World, size: int) -> "ContextGroup":
        """Returns this rank's group, if each `size` neighbouring ranks share a sequence."""
        row, _ = world.grid(size)
        return cls(world.rank % size, size, row, world.device)

    def own(self, seq_idx: Tensor | None, length: int, before: int = 0) -> Tensor | None:
        """Returns this rank's columns of a whole sequence's seq_idx (batch, size * length), after `before` columns of
        the previous rank. For the first rank, its own first column takes their place."""
        if seq_idx is None:
            return None
        first = self.rank * length
        places = torch.arange(first - before, first + length, device=seq_idx.device)
        return seq_idx[:, places.clamp(min=0)]

    def continues(self, seq_idx: Tensor | None, length: int) -> Tensor:
        """Returns, for each of this rank's positions, whether it belongs to the document of the previous rank's last
        position, (batch or 1, length) bool. The first rank's result has no meaning: only zeros enter there."""
        with_last = self.own(seq_idx, length, before=1)
        if with_last is None:
            return torch.ones(1, length, dtype=torch.bool, device=self.device)
        return with_last[:, 1:] == with_last[:, :1]

    def inputs_before(self, x: Tensor, count: int) -> Tensor:
        """Returns the previous rank's last `count` positions of x (batch, length >= count, ...); on the first rank,
        zeros."""
        return _FromLeft.apply(x[:, x.shape[1] - count :], self)

    def entering_state(self, last: Tensor, decay: Tensor) -> Tensor:
        """Returns the state after all earlier ranks' positions, of a recurrence that starts from zeros on the first
        rank.

        last: the state after this rank's positions if they start from zeros. decay: the factor by which this rank's
        positions multiply an earlier state; it broadcasts to `last`. Both are float32 or float64.
        """
        return _EnteringState.apply(last, decay, self)

    def whole_sequence(self, x: Tensor) -> Tensor:
        """Returns all ranks' x (batch, length, ...), concatenated: (batch, size * length, ...)."""
        return _WholeSequence.apply(x, self)

    def gather(self, x: Tensor) -> Tensor:
        """Returns every rank's x, (size, *x.shape), without gradient."""
        gathered = x.new_empty(self.size, *x.shape)
        gather_into(gathered.view(-1), x.contiguous().view(-1), self.group)
        return gathered

    def scatter_sum(self, parts: Tensor) -> Tensor:
        """Returns this rank's part of the sum over ranks of `parts` (size, ...), without gradient. May overwrite
        `parts`."""
        own = parts.new_empty(parts.shape[1:])
        scatter_sum(own.view(-1), parts.view(-1), self.group)
        return own

    def shift(self, x: Tensor, step: int) -> Tensor:
        """Returns x of the rank `step` places earlier, or zeros if there is none, without gradient. Sends this rank's x
        `step` places further."""
        received = torch.zeros_like(x)
        exchanges = []
        target = self.rank + step
        source = self.rank - step
        if 0 <= target < self.size:
            exchanges.append(dist.P2POp(dist.isend, x, self._global_rank(target), self.group))
        if 0 <= source < self.size:
            exchanges.append(
                dist.P2POp(dist.irecv, received, self._global_rank(source), self.group)
            )
        for request in dist.batch_isend_irecv(exchanges):
            request.wait()
        return received

    def _global_rank(self, place: int) -> int:
        return dist.get_global_rank(self.group, place)


class _FromLeft(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tail: Tensor, context: ContextGroup) -> Tensor:
        ctx.context = context
        return context.shift(tail.contiguous(), 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.context.shift(grad.contiguous(), -1), None


class _EnteringState(torch.autograd.Function):
    """The recurrence over ranks. With S and P each rank's last state and decay: h[0] = 0, h[r + 1] = P[r] h[r] + S[r].
    Backward, with dh and dS the gradients of h and S: dS[r] = dh[r + 1] + P[r + 1] dS[r + 1], the same sum from the
    other end."""

    @staticmethod
    def forward(ctx: Any, last: Tensor, decay: Tensor, context: ContextGroup) -> Tensor:
        flat = torch.cat([last.flatten(), decay.flatten()])
        gathered = context.gather(flat)
        lasts, decays = gathered.split([last.numel(), decay.numel()], dim=1)
        lasts = lasts.view(-1, *last.shape)
        decays = decays.view(-1, *decay.shape)
        state = torch.zeros_like(last)
        for before in range(context.rank):
            state = torch.addcmul(lasts[before], decays[before], state)
        ctx.context = context
        ctx.save_for_backward(state, decays[context.rank + 1 :].clone())
        return state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        state, decays_behind = ctx.saved_tensors
        behind = ctx.context.gather(grad)[ctx.context.rank + 1 :]
        grad_last = torch.zeros_like(grad)
        for index in reversed(range(len(behind))):
            grad_last = torch.addcmul(behind[index], decays_behind[index], grad_last)
        grad_decay = (grad_last * state).sum_to_size(decays_behind.shape[1:])
        return grad_last, grad_decay, None


class _WholeSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextGroup) -> Tensor:
        ctx.context = context
        return context.gather(x).transpose(0, 1).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        context = ctx.context
        by_rank = grad.unflatten(1, (context.size, -1)).transpose(0, 1)
        by_rank = by_rank.to(torch.promote_types(grad.dtype, torch.float32))  # for the sum
        by_rank = by_rank.clone(memory_format=torch.contiguous_format)  # the sum may overwrite it
        return context.scatter_sum(by_rank).to(grad.dtype), None
