"""Defines the interface between the sharding strategies and the training loop. This interface gives access to this rank's
part of each tensor.

Under every strategy, the gradients are sums over ranks in fp32. They are not divided by the number of ranks: the caller
must scale its loss.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from mamba_fsdp.parallel.world import World
from mamba_fsdp.this_process import progress


@dataclass
class Shard:
    """A rank's part of the tensor `name`: a range of elements of the flattened tensor, from the element `start` on.

    shape: the shape of the whole tensor, the same on all ranks. data: the elements of the range, 1-D, on the rank's
    device; it can be empty. `data` shares the storage of the trained parameter or moment: writing to it changes this tensor.
    replicas: the number of ranks that have the same range. replica_index: the index of this rank among them.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    data: torch.Tensor
    replicas: int = 1
    replica_index: int = 0


@torch.no_grad()
def fill_shards(
    shards: Iterable[Shard], read_slice: Callable[[str, int, int], torch.Tensor]
) -> None:
    """Fills every shard with the values that `read_slice` returns.

    read_slice(name, start, stop): returns the elements [start, stop) of the flattened tensor `name`."""
    for shard in shards:
        if shard.data.numel():
            shard.data.copy_(read_slice(shard.name, shard.start, shard.start + shard.data.numel()))
            progress.touch()


@dataclass(frozen=True)
class ShardLayout:
    """Describes how a flattened parameter is split over the ranks of a shard group.

    ranks: the number of ranks in the group. Rank i is assigned the range [first + i * step, first + (i + 1) * step) of
    elements, and stores the part of it that is inside the parameter. With FSDP1, `first` can be negative."""

    ranks: int
    step: int
    first: int = 0


@dataclass(eq=False)
class ParameterSlot:
    """A parameter's place in the model, and this rank's part of it. Sharding replaces the nn.Parameter object, but its
    place in the modules that own it stays the same.

    local: this rank's part of the parameter. The optimizer updates it. It is an ordinary tensor that shares the storage
    of the model's parameter. layout: the split of the parameter over ranks. Both are set by ParallelModel.
    """

    owners: list[tuple[nn.Module, str]]  # (module, attribute); several for tied weights
    names: list[str]  # one per owner; the first is the parameter's name
    shape: tuple[int, ...]  # shape of the whole parameter
    local: nn.Parameter = field(init=False)
    layout: ShardLayout = field(init=False)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def parameter(self) -> nn.Parameter:
        module, attribute = self.owners[0]
        return getattr(module, attribute)

    def part(self, rank: int) -> slice:
        """Returns the range of the flattened parameter that the rank `rank` of the world stores."""
        size = math.prod(self.shape)
        layout = self.layout
        start = layout.first + rank % layout.ranks * layout.step
        stop = start + layout.step
        return slice(min(max(0, start), size), min(max(0, stop), size))

    def materialize(self, device: torch.device) -> None:
        """Moves the whole parameter to the device. Its content is undefined if it was on the meta device. Tied weights
        stay tied."""
        old = self.parameter
        # torch.empty_like is not used, because its first call imports modules for a second.
        if old.is_meta:
            value = torch.empty(old.shape, dtype=old.dtype, device=device)
        else:
            value = old.detach().to(device)
        new = nn.Parameter(value, requires_grad=old.requires_grad)
        for module, attribute in self.owners:
            setattr(module, attribute, new)


def find_slots(model: nn.Module) -> list[ParameterSlot]:
    """Returns the ParameterSlot of every parameter, in the order of `model.named_parameters()`. A tied weight has one
    slot."""
    assert not list(model.buffers()), "nothing would fill the buffers of a model without storage"
    slots: dict[int, ParameterSlot] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        slot = slots.setdefault(id(parameter), ParameterSlot([], [], tuple(parameter.shape)))
        module, _, attribute = name.rpartition(".")
        slot.owners.append((model.get_submodule(module), attribute))
        slot.names.append(name)
    return list(slots.values())


class ParallelModel:
    """A model that is distributed over the ranks. Each strategy has a subclass; this class is for a single process.

    module: the module to call. model: the MambaLM inside it. sharded: the slots of the parameters that are split over
    shard groups. replicated: the slots of the parameters that every rank stores completely.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        world: World,
        slots: list[ParameterSlot],
        *,
        parts: dict[ParameterSlot, tuple[nn.Parameter, ShardLayout]],
        no_sync: bool = False,
    ) -> None:
        """Sets `local` and `layout` of each slot.

        parts: {sharded slot: (this rank's part of the parameter, the parameter's layout)}. no_sync: whether only the
        last micro-batch of a step reduces gradients."""
        self.model = model
        self.module = module
        self.world = world
        self.no_sync = no_sync
        self.slots = slots
        self.sharded = list(parts)
        self.replicated = [slot for slot in slots if slot not in parts]
        for slot in slots:
            unsharded = slot.parameter, ShardLayout(1, slot.parameter.numel())
            slot.local, slot.layout = parts.get(slot, unsharded)
            part = slot.part(world.rank)
            assert slot.local.numel() == part.stop - part.start, (
                f"the layout of {slot.name} is wrong"
            )

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns {name: this rank's part of the parameter}, the tensors that the optimizer updates. A part can be
        empty, and it can be 1-D."""
        return {slot.name: slot.local for slot in self.slots}

    def shards(self, optimizer: torch.optim.AdamW | None = None) -> list[Shard]:
        """Returns this rank's Shard of every parameter and, with an optimizer over `parameters()`, of every moment.

        A moment is named optimizer/<parameter>/<moment>, where <moment> is exp_avg or exp_avg_sq for AdamW and
        momentum_buffer for Muon. Moments that the optimizer has not yet created are created as zeros."""
        shards = [self._shard(slot, slot.name, slot.local) for slot in self.slots]
        if optimizer:
            _make_moments(optimizer)
            for slot in self.slots:
                for moment, data in optimizer.state[slot.local].items():
                    if moment != "step":
                        shards.append(self._shard(slot, f"optimizer/{slot.name}/{moment}", data))
        return shards

    def _shard(self, slot: ParameterSlot, name: str, data: torch.Tensor) -> Shard:
        """Returns the Shard with the elements `data` of the tensor `name`. The tensor has the layout of the slot's
        parameter."""
        rank = self.world.rank
        group = slot.layout.ranks
        start = slot.part(rank).start
        replicas = self.world.size // group
        flat = data.detach().view(-1)
        return Shard(name, slot.shape, start, flat, replicas, rank // group)

    def accumulate(self, last: bool) -> AbstractContextManager:
        """Returns the context for the forward and backward pass of one micro-batch. With no_sync, only the last
        micro-batch reduces gradients."""
        if self.no_sync and not last:
            return self.module.no_sync()
        return nullcontext()

    def reduce_gradients(self) -> None:
        """Makes every gradient the sum over all ranks. Call it after the last backward pass. This class sums the
        gradients of replicated parameters; subclasses also handle the sharded ones."""
        if self.replicated and self.world.size > 1:
            gradients = [slot.local.grad.view(-1) for slot in self.replicated]
            total = self.world.all_reduce_sum(torch.cat(gradients))
            sums = total.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, list(sums))

    def gradient_squares(self) -> torch.Tensor:
        """Returns this rank's contribution to the squared 2-norm of the whole gradient, a 0-dim fp64 tensor. The sum
        over all ranks is the squared norm. The contribution is not finite if a gradient is not finite."""
        squares = torch.zeros((), dtype=torch.float64, device=self.world.device)
        # Several ranks have the same elements; only the first shard group counts them.
        rank = self.world.rank
        gradients = [
            slot.local.grad
            for slot in self.slots
            if rank < slot.layout.ranks and slot.local.grad is not None and slot.local.grad.numel()
        ]
        if gradients:
            squares += torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        return squares

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiplies every gradient by `factor`, a 0-dim fp32 tensor on the device."""
        gradients = [slot.local.grad for slot in self.slots if slot.local.grad is not None]
        torch._foreach_mul_(gradients, factor)

    def set_optimizer_steps(self, optimizer: torch.optim.AdamW, steps: int) -> None:
        """Sets the step count of AdamW for its bias correction. The state must exist: call `shards(optimizer)`
        first."""
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].fill_(steps)


def _make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Creates the optimizer state that the first step of AdamW would create, if it does not exist yet."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state[parameter]:
                continue
            device = parameter.device if group["fused"] else "cpu"
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
