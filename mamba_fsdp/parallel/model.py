"""What every sharding strategy offers to the loop: one small interface, over the part of each tensor that a rank holds.

Gradients are sums over ranks, in fp32 and divided by nothing under every strategy: the caller scales its loss.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from mamba_fsdp.heartbeat import heart
from mamba_fsdp.parallel.world import World


@dataclass
class Shard:
    """The elements [start, start + count) of the tensor `name`, flattened row by row. Counts are elements, not bytes.

    shape: of the whole tensor, the same on all ranks. data: these elements, of shape (count,), maybe (0,), on the
    rank's device; it shares the storage of what is trained: writing to it changes the parameter. The same elements lie
    on `replicas` ranks, of which this is number `replica_index`. tied: other names of the same tensor.
    filled: what verifying a checkpoint has read into `data`, for its loading: (file, start of a piece, offset, count).
    """

    name: str
    shape: tuple[int, ...]
    start: int
    data: torch.Tensor
    replicas: int = 1
    replica_index: int = 0
    tied: tuple[str, ...] = ()
    filled: set[tuple[Path, int, int, int]] = field(default_factory=set, repr=False)


@torch.no_grad()
def fill_parts(shards: Iterable[Shard], part_of: Callable[[str, int, int], torch.Tensor]) -> None:
    """Set every shard that verifying has not filled from `part_of(name, start, stop)`, the elements [start, stop) of
    the flattened tensor."""
    for shard in shards:
        if shard.data.numel() > sum(count for *_, count in shard.filled):
            shard.data.copy_(part_of(shard.name, shard.start, shard.start + shard.data.numel()))
            heart.beat()
        shard.filled.clear()  # from here on it may change


@dataclass(eq=False)
class ParameterSlot:
    """Where a parameter sits in the model, and this rank's part of it. Sharding replaces the parameter; its owners
    (several when tied) stay."""

    owners: list[tuple[nn.Module, str]]  # (module, attribute)
    names: list[str]  # one per owner; the first is the parameter's name
    shape: tuple[int, ...]  # of the whole parameter
    local: nn.Parameter = field(
        init=False
    )  # the part as the optimiser sees it: plain, sharing the model's storage
    start: int = 0  # these three as in a Shard
    replicas: int = 1
    replica_index: int = 0

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def parameter(self) -> nn.Parameter:
        module, attribute = self.owners[0]
        return getattr(module, attribute)

    def materialize(self, device: torch.device) -> None:
        """Put the whole parameter on the device, with undefined content if it had no storage. Ties stay."""
        old = self.parameter
        # empty, since empty_like of a tensor without storage imports a second's worth of torch
        value = (
            torch.empty(old.shape, dtype=old.dtype, device=device)
            if old.is_meta
            else old.detach().to(device)
        )
        new = nn.Parameter(value, requires_grad=old.requires_grad)
        for module, attribute in self.owners:
            setattr(module, attribute, new)

    def shard(self, name: str, data: torch.Tensor, tied: tuple[str, ...] = ()) -> Shard:
        """The Shard of `data`, which lies over the whole tensor `name` as this part does over the whole parameter."""
        return Shard(
            name,
            self.shape,
            self.start,
            data.detach().view(-1),
            self.replicas,
            self.replica_index,
            tied,
        )


def find_slots(model: nn.Module) -> list[ParameterSlot]:
    """The ParameterSlot of every parameter, in the order of `model.named_parameters()`."""
    assert not list(model.buffers()), (
        "a model without storage can't bring buffers: nobody would fill them"
    )
    slots: dict[int, ParameterSlot] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        slot = slots.setdefault(id(parameter), ParameterSlot([], [], tuple(parameter.shape)))
        module, _, attribute = name.rpartition(".")
        slot.owners.append((model.get_submodule(module), attribute))
        slot.names.append(name)
    return list(slots.values())


class ParallelModel:
    """A model spread over the world. `module` is what to call, `model` the bare model inside.

    parts: slot -> (this rank's part, where it starts in the flattened parameter), of each parameter that is cut over
    groups of `shard_size` neighbouring ranks: the slots in `sharded`. The others, `whole`, are on all ranks. no_sync:
    whole gradients wait for the last micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        world: World,
        slots: list[ParameterSlot],
        *,
        parts: dict[ParameterSlot, tuple[nn.Parameter, int]],
        shard_size: int = 1,
        no_sync: bool = False,
    ):
        self.model, self.module, self.world, self.no_sync, self.slots = (
            model,
            module,
            world,
            no_sync,
            slots,
        )
        self.sharded, self.whole = list(parts), [slot for slot in slots if slot not in parts]
        for slot in self.whole:
            slot.local, slot.replicas, slot.replica_index = slot.parameter, world.size, world.rank
        for slot, (slot.local, slot.start) in parts.items():
            slot.replicas, slot.replica_index = world.size // shard_size, world.rank // shard_size

    def parameters(self) -> dict[str, nn.Parameter]:
        """Name -> what the optimiser updates: this rank's part of each parameter. Maybe empty, or flat."""
        return {slot.name: slot.local for slot in self.slots}

    def shards(self, optimizer: torch.optim.AdamW | None = None) -> list[Shard]:
        """A Shard for every parameter; of an AdamW over `parameters()` also optimizer/<parameter>/exp_avg and
        .../exp_avg_sq, which are zeros at first."""
        state = optimizer.state if optimizer else {}
        for group in optimizer.param_groups if optimizer else ():
            for parameter in group["params"]:
                if not state[parameter]:
                    device = parameter.device if group["fused"] or group["capturable"] else "cpu"
                    state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32, device=device),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return [
            slot.shard(slot.name, slot.local, tied=tuple(slot.names[1:])) for slot in self.slots
        ] + [
            slot.shard(f"optimizer/{slot.name}/{name}", state[slot.local][name])
            for slot in self.slots
            if optimizer
            for name in ("exp_avg", "exp_avg_sq")
        ]

    def accumulate(self, last: bool) -> AbstractContextManager:
        """Context for one micro-batch's forward and backward; what may wait for the `last` one is reduced then."""
        return self.module.no_sync() if self.no_sync and not last else nullcontext()

    def reduce_gradients(self) -> None:
        """Make every gradient its sum over all ranks, after the last backward. Here: those of `whole`."""
        gradients = [slot.local.grad.view(-1) for slot in self.whole]
        if gradients and self.world.size > 1:
            total = self.world.all_reduce_sum(torch.cat(gradients))
            torch._foreach_copy_(
                gradients, list(total.split([gradient.numel() for gradient in gradients]))
            )

    def gradient_squares(self) -> torch.Tensor:
        """This rank's share of the whole gradient's 2-norm squared, a 0-dim fp64 tensor; inf and nan come through."""
        # Each element counts once: of replicas, only number 0 does.
        gradients = [slot.local.grad for slot in self.slots if slot.replica_index == 0]
        gradients = [
            gradient for gradient in gradients if gradient is not None and gradient.numel()
        ]
        squares = torch.zeros((), dtype=torch.float64, device=self.world.device)
        if gradients:
            squares += torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        return squares

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply every gradient by a number: a 0-dim fp32 tensor on the device."""
        gradients = [slot.local.grad for slot in self.slots]
        torch._foreach_mul_([gradient for gradient in gradients if gradient is not None], factor)

    def set_optimizer_steps(self, optimizer: torch.optim.AdamW, steps: int) -> None:
        """Let AdamW's bias correction be that after `steps` updates. Call after `shards` of it."""
        for state in optimizer.state.values():
            state["step"].fill_(steps)
