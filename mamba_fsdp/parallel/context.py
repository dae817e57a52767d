"""Context parallelism: each sequence is split over neighbouring ranks, which hand on what a recurrence, a convolution and
attention need of the positions before.

Every rank of a group has `length` positions, in the order of ranks. Three exchanges serve all layers, forward and backward:

    inputs_before    the last inputs of the rank on the left, for the convolution
    entering_state   the state that the ranks before leave, for the recurrence
    whole_sequence   all positions of all ranks, for attention's keys and values

All ranks of a group make the same calls in the same order; so do their backward passes.
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
    """The ranks that share each sequence. rank: this one's place among them."""

    rank: int
    size: int
    group: dist.ProcessGroup
    device: torch.device

    @classmethod
    def of(cls, world: World, size: int) -> "ContextGroup":
        """Returns that of this rank, where each `size` neighbouring ranks share a sequence."""
        row, _ = world.grid(size)
        return cls(world.rank % size, size, row, world.device)

    def own(self, seq_idx: Tensor | None, length: int, before: int = 0) -> Tensor | None:
        """Returns the columns of a whole sequence's seq_idx (batch, size * length) that are this rank's, and `before` of
        the rank on the left; the first rank's own first column where there is none."""
        if seq_idx is None:
            return None
        first = self.rank * length
        places = torch.arange(first - before, first + length, device=seq_idx.device)
        return seq_idx[:, places.clamp(min=0)]

    def continues(self, seq_idx: Tensor | None, length: int) -> Tensor:
        """Returns where this rank's positions belong to the document in which the rank on the left ends, (batch or 1,
        length) bool. The first rank's answer means nothing: only zeros enter there."""
        with_last = self.own(seq_idx, length, before=1)
        if with_last is None:
            return torch.ones(1, length, dtype=torch.bool, device=self.device)
        return with_last[:, 1:] == with_last[:, :1]

    def inputs_before(self, x: Tensor, count: int) -> Tensor:
        """Returns the last `count` positions of the rank on the left, of x (batch, length >= count, ...); the first rank
        gets zeros."""
        return _FromLeft.apply(x[:, x.shape[1] - count :], self)

    def entering_state(self, last: Tensor, decay: Tensor) -> Tensor:
        """Returns the state in which the ranks before leave a recurrence that starts from zeros at the first of them.

        last: the state behind this rank's positions, had they started from zeros. decay: what remains behind them of a
        state before them; it broadcasts to `last`. Both in float32 or float64.
        """
        return _EnteringState.apply(last, decay, self)

    def whole_sequence(self, x: Tensor) -> Tensor:
        """Returns all ranks' x (batch, length, ...), one behind the other: (batch, size * length, ...)."""
        return _WholeSequence.apply(x, self)

    def gather(self, x: Tensor) -> Tensor:
        """Returns (size, *x.shape), every rank's x. It has no gradient."""
        gathered = x.new_empty(self.size, *x.shape)
        gather_into(gathered.view(-1), x.contiguous().view(-1), self.group)
        return gathered

    def scatter_sum(self, parts: Tensor) -> Tensor:
        """Returns this rank's part of the ranks' sum of `parts` (size, ...), which it may overwrite. It has no gradient."""
        own = parts.new_empty(parts.shape[1:])
        scatter_sum(own.view(-1), parts.view(-1), self.group)
        return own

    def shift(self, x: Tensor, step: int) -> Tensor:
        """Sends x to the rank `step` places on; returns what comes from as many places back, zeros where nothing does. It
        has no gradient."""
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
    """With S and P each rank's last state and decay: h[0] = 0, h[r + 1] = P[r] h[r] + S[r]. The gradient of S[r] is that of
    h[r + 1] and, where later ranks read it, P[r + 1] times that of S[r + 1]: the same sum from the other end."""

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
        by_rank = by_rank.to(torch.promote_types(grad.dtype, torch.float32))  # a sum of many ranks'
        by_rank = by_rank.clone(memory_format=torch.contiguous_format)  # the sum may overwrite it
        return context.scatter_sum(by_rank).to(grad.dtype), None
