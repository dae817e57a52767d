"""Defines the interface of every sharding strategy to the training loop, over the part of each tensor that a rank
holds.

Under every strategy, gradients are sums over ranks in fp32, without any division: the caller scales its loss.
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
    """The elements [start, start + count) of the tensor `name`, flattened row by row. Counts are in elements, not
    bytes.

    shape: of the whole tensor, the same on all ranks. data: the elements, of shape (count,), which may be empty, on the
    rank's device. They share the storage of the trained parameter, so that writing to them changes it. `replicas` ranks
    hold the same elements; this rank is number `replica_index` of them.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    data: torch.Tensor
    replicas: int = 1
    replica_index: int = 0


@torch.no_grad()
def fill_parts(shards: Iterable[Shard], part_of: Callable[[str, int, int], torch.Tensor]) -> None:
    """Fills every shard from `part_of(name, start, stop)`, which returns the elements [start, stop) of the flattened
    tensor."""
    for shard in shards:
        if shard.data.numel():
            shard.data.copy_(part_of(shard.name, shard.start, shard.start + shard.data.numel()))
            progress.touch()


@dataclass(frozen=True)
class Cut:
    """The cut of a flattened parameter over the `ranks` of a shard group: the range of rank i is [first + i * step,
    first + (i + 1) * step), and the rank holds the part of this range that lies inside the parameter."""

    ranks: int
    step: int
    first: int = 0


@dataclass(eq=False)
class ParameterSlot:
    """A parameter's place in the model, and this rank's part of the parameter. Sharding replaces the parameter, but its
    owners (several for tied weights) stay.

    local: the part that the optimiser sees, a plain tensor that shares the model's storage.
    """

    owners: list[tuple[nn.Module, str]]  # (module, attribute)
    names: list[str]  # one per owner; the first is the parameter's name
    shape: tuple[int, ...]  # of the whole parameter
    local: nn.Parameter = field(init=False)
    cut: Cut = field(init=False)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def parameter(self) -> nn.Parameter:
        module, attribute = self.owners[0]
        return getattr(module, attribute)

    def part(self, rank: int) -> slice:
        """Returns the range of the flattened parameter that a rank of the world holds."""
        size = math.prod(self.shape)
        cut = self.cut
        start = cut.first + rank % cut.ranks * cut.step
        stop = start + cut.step
        return slice(min(max(0, start), size), min(max(0, stop), size))

    def materialize(self, device: torch.device) -> None:
        """Puts the whole parameter on the device, with undefined content if it had no storage. Tied weights stay
        tied."""
        old = self.parameter
        if old.is_meta:  # not empty_like, which would import parts of torch for a second
            value = torch.empty(old.shape, dtype=old.dtype, device=device)
        else:
            value = old.detach().to(device)
        new = nn.Parameter(value, requires_grad=old.requires_grad)
        for module, attribute in self.owners:
            setattr(module, attribute, new)


def find_slots(model: nn.Module) -> list[ParameterSlot]:
    """Returns the ParameterSlot of every parameter, in the order of `model.named_parameters()`."""
    assert not list(model.buffers()), "nothing would fill the buffers of a model without storage"
    slots: dict[int, ParameterSlot] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        slot = slots.setdefault(id(parameter), ParameterSlot([], [], tuple(parameter.shape)))
        module, _, attribute = name.rpartition(".")
        slot.owners.append((model.get_submodule(module), attribute))
        slot.names.append(name)
    return list(slots.values())


class ParallelModel:
    """A model spread over the world. `module` is the module to call, `model` the bare model inside it.

    `sharded` has the slots of parameters that are cut over groups of neighbouring ranks, `whole` the slots of
    parameters that every rank holds whole. Each strategy has a subclass; this class itself serves a single process.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        world: World,
        slots: list[ParameterSlot],
        *,
        parts: dict[ParameterSlot, tuple[nn.Parameter, Cut]],
        no_sync: bool = False,
    ) -> None:
        """Gives each slot its part and Cut. parts: of each sharded slot, this rank's part and the parameter's
        Cut. no_sync: gradients are reduced only in the last micro-batch of a step."""
        self.model = model
        self.module = module
        self.world = world
        self.no_sync = no_sync
        self.slots = slots
        self.sharded = list(parts)
        self.whole = [slot for slot in slots if slot not in parts]
        for slot in slots:
            whole = slot.parameter, Cut(1, slot.parameter.numel())
            slot.local, slot.cut = parts.get(slot, whole)
            held = slot.part(world.rank)
            assert slot.local.numel() == held.stop - held.start, f"{slot.name} is cut otherwise"

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns {name: the tensor that the optimiser updates}: this rank's part of each parameter, which may be empty
        or flat."""
        return {slot.name: slot.local for slot in self.slots}

    def shards(self, optimizer: torch.optim.AdamW | None = None) -> list[Shard]:
        """Returns a Shard for every parameter and, given an optimiser over `parameters()`, also for every moment, as
        optimizer/<parameter>/<moment>. The moments are exp_avg and exp_avg_sq, or Muon's momentum_buffer; they start at
        0."""
        shards = [self._shard(slot, slot.name, slot.local) for slot in self.slots]
        if optimizer:
            _make_moments(optimizer)
            for slot in self.slots:
                for moment, data in optimizer.state[slot.local].items():
                    if moment != "step":
                        shards.append(self._shard(slot, f"optimizer/{slot.name}/{moment}", data))
        return shards

    def _shard(self, slot: ParameterSlot, name: str, data: torch.Tensor) -> Shard:
        """Returns the Shard of `data`, this rank's part of the tensor `name`, which is cut as the slot's parameter
        is."""
        rank = self.world.rank
        group = slot.cut.ranks
        start = slot.part(rank).start
        replicas = self.world.size // group
        flat = data.detach().view(-1)
        return Shard(name, slot.shape, start, flat, replicas, rank // group)

    def accumulate(self, last: bool) -> AbstractContextManager:
        """Returns the context for one micro-batch's forward and backward. With no_sync, gradients are reduced in the
        `last` one only."""
        if self.no_sync and not last:
            return self.module.no_sync()
        return nullcontext()

    def reduce_gradients(self) -> None:
        """Makes every gradient the sum over all ranks; call it after the last backward pass. This class sums the
        gradients of `whole`."""
        if self.whole and self.world.size > 1:
            gradients = [slot.local.grad.view(-1) for slot in self.whole]
            total = self.world.all_reduce_sum(torch.cat(gradients))
            sums = total.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, list(sums))

    def gradient_squares(self) -> torch.Tensor:
        """Returns this rank's share of the whole gradient's squared 2-norm, 0-dim fp64. If a gradient is not finite,
        neither is the result."""
        squares = torch.zeros((), dtype=torch.float64, device=self.world.device)
        # Only the first replica of an element counts.
        rank = self.world.rank
        gradients = [
            slot.local.grad
            for slot in self.slots
            if rank < slot.cut.ranks and slot.local.grad is not None and slot.local.grad.numel()
        ]
        if gradients:
            squares += torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        return squares

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiplies every gradient by `factor`, a 0-dim fp32 tensor on the device."""
        gradients = [slot.local.grad for slot in self.slots if slot.local.grad is not None]
        torch._foreach_mul_(gradients, factor)

    def set_optimizer_steps(self, optimizer: torch.optim.AdamW, steps: int) -> None:
        """Sets the number of updates that AdamW's bias correction counts. Call it after `shards(optimizer)`."""
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].fill_(steps)


def _make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Makes the state of an AdamW that has not yet stepped, as its first step would make it."""
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
