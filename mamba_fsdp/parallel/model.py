"""What every sharding strategy offers to the loop: one small interface, over the part of each tensor that a rank holds.

Gradients are sums over ranks, in fp32 and divided by nothing under every strategy: the caller scales its loss.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from mamba_fsdp.heartbeat import heart
from mamba_fsdp.parallel.world import World


@dataclass
class Shard:
    """The elements [start, start + count) of the tensor `name`, flattened row by row. Counts are elements, not bytes.

    shape: of the whole tensor, the same on all ranks. data: these elements, of shape (count,), maybe (0,), on the
    rank's device; it shares the storage of what is trained: writing to it changes the parameter. The same elements lie
    on `replicas` ranks, of which this is number `replica_index`.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    data: torch.Tensor
    replicas: int = 1
    replica_index: int = 0


@torch.no_grad()
def fill_parts(shards: Iterable[Shard], part_of: Callable[[str, int, int], torch.Tensor]) -> None:
    """Sets every shard from `part_of(name, start, stop)`, the elements [start, stop) of the flattened tensor."""
    for shard in shards:
        if shard.data.numel():
            shard.data.copy_(part_of(shard.name, shard.start, shard.start + shard.data.numel()))
            heart.beat()


@dataclass(frozen=True)
class Cut:
    """How a flattened parameter is cut over the `ranks` of a shard group: number i of them holds those of the elements
    [first + i * step, first + (i + 1) * step) that the parameter has."""

    ranks: int
    step: int
    first: int = 0


@dataclass(eq=False)
class ParameterSlot:
    """A parameter's place in the model, and this rank's part of it. Sharding replaces the parameter; its owners (several
    when tied) stay.

    local: the part as the optimiser sees it, a plain tensor that shares the model's storage.
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
        """Returns the range of the flattened parameter that lies on a rank of the world."""
        size = math.prod(self.shape)
        cut = self.cut
        start = cut.first + rank % cut.ranks * cut.step
        stop = start + cut.step
        return slice(min(max(0, start), size), min(max(0, stop), size))

    def materialize(self, device: torch.device) -> None:
        """Puts the whole parameter on the device, with undefined content if it had no storage. Ties stay."""
        old = self.parameter
        if old.is_meta:  # not empty_like, which imports a second's worth of torch here
            value = torch.empty(old.shape, dtype=old.dtype, device=device)
        else:
            value = old.detach().to(device)
        new = nn.Parameter(value, requires_grad=old.requires_grad)
        for module, attribute in self.owners:
            setattr(module, attribute, new)


def find_slots(model: nn.Module) -> list[ParameterSlot]:
    """Returns the ParameterSlot of every parameter, in the order of `model.named_parameters()`."""
    assert not list(model.buffers()), "nobody would fill the buffers of a model without storage"
    slots: dict[int, ParameterSlot] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        slot = slots.setdefault(id(parameter), ParameterSlot([], [], tuple(parameter.shape)))
        module, _, attribute = name.rpartition(".")
        slot.owners.append((model.get_submodule(module), attribute))
        slot.names.append(name)
    return list(slots.values())


class ParallelModel:
    """A model spread over the world. `module` is what to call, `model` the bare model inside.

    `sharded` are the slots of parameters that are cut over groups of neighbouring ranks, `whole` those of parameters
    that lie on all ranks. Each strategy is a subclass or a module of its own; this one serves a single process.
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
        """parts: of each sharded slot this rank's part and how the parameter is cut. no_sync: whole gradients wait for
        the last micro-batch."""
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
        """Returns {name: what the optimiser updates}: this rank's part of each parameter, maybe empty or flat."""
        return {slot.name: slot.local for slot in self.slots}

    def shards(self, optimizer: torch.optim.AdamW | None = None) -> list[Shard]:
        """Returns a Shard for every parameter; of an optimiser over `parameters()` also optimizer/<parameter>/<moment> of
        each moment, which are zeros at first: exp_avg and exp_avg_sq, or Muon's momentum_buffer."""
        shards = [self._shard(slot, slot.name, slot.local) for slot in self.slots]
        if optimizer:
            _make_moments(optimizer)
            for slot in self.slots:
                for moment, data in optimizer.state[slot.local].items():
                    if moment != "step":
                        shards.append(self._shard(slot, f"optimizer/{slot.name}/{moment}", data))
        return shards

    def _shard(self, slot: ParameterSlot, name: str, data: torch.Tensor) -> Shard:
        """Returns the Shard of `data`, which is cut from the tensor `name` as the slot's part is from its parameter."""
        rank = self.world.rank
        group = slot.cut.ranks
        start = slot.part(rank).start
        replicas = self.world.size // group
        flat = data.detach().view(-1)
        return Shard(name, slot.shape, start, flat, replicas, rank // group)

    def accumulate(self, last: bool) -> AbstractContextManager:
        """Returns the context for one micro-batch's forward and backward; what may wait is reduced with the `last`."""
        if self.no_sync and not last:
            return self.module.no_sync()
        return nullcontext()

    def reduce_gradients(self) -> None:
        """Makes every gradient its sum over all ranks, after the last backward. Here: those of `whole`."""
        gradients = [slot.local.grad.view(-1) for slot in self.whole]
        if gradients and self.world.size > 1:
            total = self.world.all_reduce_sum(torch.cat(gradients))
            sums = total.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, list(sums))

    def gradient_squares(self) -> torch.Tensor:
        """Returns this rank's share of the whole gradient's squared 2-norm, 0-dim fp64; inf and nan come through."""
        squares = torch.zeros((), dtype=torch.float64, device=self.world.device)
        # Each element counts once: of replicas, only the first does.
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
        """Multiplies every gradient by a number: a 0-dim fp32 tensor on the device."""
        gradients = [slot.local.grad for slot in self.slots if slot.local.grad is not None]
        torch._foreach_mul_(gradients, factor)

    def set_optimizer_steps(self, optimizer: torch.optim.AdamW, steps: int) -> None:
        """Lets AdamW's bias correction be that after `steps` updates. Call after `shards` of it."""
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].fill_(steps)


def _make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Gives an AdamW that has not yet stepped the state that its first step would make."""
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
