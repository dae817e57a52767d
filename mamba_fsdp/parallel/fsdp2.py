"""Sharding with `fully_shard` (FSDP2): every parameter is cut by rows over the ranks of a shard group."""

import contextlib
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mamba_fsdp.parallel.model import ParallelModel, ParameterSlot
from mamba_fsdp.parallel.world import World


class FullyShard(ParallelModel):
    def accumulate(self, last: bool) -> contextlib.AbstractContextManager:
        self.module.set_requires_gradient_sync(
            last or not self.no_sync
        )  # what waits is summed in fp32
        self.module.set_requires_all_reduce(last)  # across the groups, where only a share waits
        return contextlib.nullcontext()

    def reduce_gradients(self) -> None:
        """Hand the local parts of the summed gradients to the plain tensors that the optimiser sees."""
        for slot in self.sharded:
            gradient, slot.parameter.grad = slot.parameter.grad, None
            slot.local.grad = None if gradient is None else gradient.to_local()
        super().reduce_gradients()


def shard(
    model: nn.Module,
    slots: list[ParameterSlot],
    whole: list[ParameterSlot],
    *,
    world: World,
    shard_size: int,
    compute_dtype: torch.dtype,
    backward_prefetch: bool,
    limit_all_gathers: bool,
    accumulate_unsharded: bool,
) -> ParallelModel:
    """Shard all but `whole` over groups of `shard_size` neighbouring ranks and replicate across the groups.

    backward_prefetch: gather the next block's weights during the backward of this one (FSDP2's own default); without it
    a block is gathered when its turn comes. limit_all_gathers: FSDP2 needs no limit, since its memory does not depend
    on how far the CPU is ahead; without it, each block is gathered one block early in the forward pass.
    """
    if shard_size == world.size:
        mesh = DeviceMesh.from_group(dist.group.WORLD, world.device.type, mesh_dim_names=("shard",))
    else:
        row, column = world.grid(shard_size)
        mesh = DeviceMesh.from_group(
            [column, row],
            world.device.type,
            torch.arange(world.size).view(-1, shard_size),
            mesh_dim_names=("replicate", "shard"),
        )
    low = None if compute_dtype == torch.float32 else compute_dtype
    policy = MixedPrecisionPolicy(
        param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False
    )

    blocks = list(model.backbone.layers)
    for unit in [*blocks, model]:
        fully_shard(
            unit, mesh=mesh, mp_policy=policy, ignored_params={slot.parameter for slot in whole}
        )
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    for block, following in zip(blocks, [*blocks[1:], None]):
        if following and not limit_all_gathers:
            block.set_modules_to_forward_prefetch([following])
        if not backward_prefetch:
            block.set_modules_to_backward_prefetch([block])  # itself, which is there already

    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=world.device)
    parts = {
        slot: _part(slot, world.rank % shard_size, shard_size)
        for slot in slots
        if slot not in whole
    }
    return FullyShard(
        model, model, world, slots, parts=parts, shard_size=shard_size, no_sync=accumulate_unsharded
    )


def _part(slot, index, count):
    """(part `index` of `count` of a parameter, where it starts): `fully_shard` deals out rows like torch.chunk."""
    part = slot.parameter.detach().to_local()
    rows, row = -(-slot.shape[0] // count), math.prod(slot.shape[1:])
    start, stop = (min(number * rows, slot.shape[0]) * row for number in (index, index + 1))
    assert part.numel() == stop - start, f"{slot.name} is not cut by rows"
    return nn.Parameter(part), start
