"""Context parallelism: splits each sequence over neighbouring ranks. The ranks exchange the inputs and states of
earlier positions that recurrences, convolutions and attention need.

Each rank of a group computes `length` consecutive positions, in the order of the ranks. There are three exchanges, each
with a forward and a backward pass:

    previous_inputs   Returns the last inputs of the previous rank, for the convolution.
    entering_state    Returns the state after the positions of all earlier ranks, for the recurrence.
    gather_sequence   Returns the positions of all ranks, for the keys and values of attention.

All ranks of a group must make the same calls in the same order, in their backward passes too.
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
    """The group of ranks that share each sequence. `rank` is the index of this rank in the group."""

    rank: int
    size: int
    group: dist.ProcessGroup
    device: torch.device

    @classmethod
    def create(cls, world: World, size: int) -> "ContextGroup":
        """Creates the groups of `size` neighbouring ranks, and returns the group of this rank. All ranks must call this method."""
        row, _ = world.grid(size)
        return cls(world.rank % size, size, row, world.device)

    def own_columns(self, seq_idx: Tensor | None, length: int, before: int = 0) -> Tensor | None:
        """Returns this rank's columns of seq_idx, (batch, before + length).

        seq_idx: of the whole sequence, (batch, size * length), or None. before: the number of columns of the previous
        rank to put in front. The first rank repeats its own first column instead."""
        if seq_idx is None:
            return None
        first = self.rank * length
        places = torch.arange(first - before, first + length, device=seq_idx.device)
        return seq_idx[:, places.clamp(min=0)]

    def continues_document(self, seq_idx: Tensor | None, length: int) -> Tensor:
        """Returns, for each position of this rank, whether it is in the same document as the last position of the
        previous rank, as a bool tensor (batch or 1, length). On the first rank the result has no effect, because it is
        applied to states and inputs that are zeros."""
        with_last = self.own_columns(seq_idx, length, before=1)
        if with_last is None:
            return torch.ones(1, length, dtype=torch.bool, device=self.device)
        return with_last[:, 1:] == with_last[:, :1]

    def previous_inputs(self, x: Tensor, count: int) -> Tensor:
        """Returns the last `count` positions of the previous rank's x, (batch, count, ...), or zeros on the first rank.

        x: (batch, length, ...) with length >= count."""
        return _PreviousInputs.apply(x[:, x.shape[1] - count :], self)

    def entering_state(self, last: Tensor, decay: Tensor) -> Tensor:
        """Returns the state of a recurrence after the positions of all earlier ranks, or zeros on the first rank.

        last: the state after this rank's positions, computed from an initial state of zeros. decay: the factor by which
        this rank's positions multiply an initial state; it broadcasts to `last`. Both are float32 or float64.
        """
        return _EnteringState.apply(last, decay, self)

    def gather_sequence(self, x: Tensor) -> Tensor:
        """Returns the x (batch, length, ...) of all ranks, concatenated to (batch, size * length, ...)."""
        return _GatherSequence.apply(x, self)

    def gather(self, x: Tensor) -> Tensor:
        """Returns the x of all ranks, stacked to (size, *x.shape). No gradient flows through it."""
        gathered = x.new_empty(self.size, *x.shape)
        gather_into(gathered.view(-1), x.contiguous().view(-1), self.group)
        return gathered

    def scatter_sum(self, parts: Tensor) -> Tensor:
        """Sums `parts` (size, ...) over the ranks, and returns this rank's part of the sum, (...). No gradient flows
        through this function. The content of `parts` can be overwritten."""
        own = parts.new_empty(parts.shape[1:])
        scatter_sum(own.view(-1), parts.view(-1), self.group)
        return own

    def shift(self, x: Tensor, step: int) -> Tensor:
        """Sends x to the rank `step` places later, and returns the x of the rank `step` places earlier, or zeros if
        there is none. A negative step shifts in the other direction. No gradient flows through it."""
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


class _PreviousInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tail: Tensor, context: ContextGroup) -> Tensor:
        ctx.context = context
        return context.shift(tail.contiguous(), 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.context.shift(grad.contiguous(), -1), None


class _EnteringState(torch.autograd.Function):
    """The recurrence over ranks. S[r] is the last state of rank r, P[r] its decay, and h[r] the state that enters it:
    h[0] = 0 and h[r + 1] = P[r] h[r] + S[r].

    The backward pass is the same recurrence in the opposite direction. With dh and dS the gradients of h and S:
    dS[r] = dh[r + 1] + P[r + 1] dS[r + 1]."""

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
        state, later_decays = ctx.saved_tensors
        later_gradients = ctx.context.gather(grad)[ctx.context.rank + 1 :]
        grad_last = torch.zeros_like(grad)
        for index in reversed(range(len(later_gradients))):
            grad_last = torch.addcmul(later_gradients[index], later_decays[index], grad_last)
        grad_decay = (grad_last * state).sum_to_size(later_decays.shape[1:])
        return grad_last, grad_decay, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextGroup) -> Tensor:
        ctx.context = context
        return context.gather(x).transpose(0, 1).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        context = ctx.context
        by_rank = grad.unflatten(1, (context.size, -1)).transpose(0, 1)
        # The sum over ranks is computed in fp32 at least. scatter_sum can overwrite its input, so the gradient is copied.
        by_rank = by_rank.to(torch.promote_types(grad.dtype, torch.float32))
        by_rank = by_rank.clone(memory_format=torch.contiguous_format)
        return context.scatter_sum(by_rank).to(grad.dtype), None
