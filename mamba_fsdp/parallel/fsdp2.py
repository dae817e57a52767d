"""Shards a model with `fully_shard` (FSDP2). FSDP2 splits each parameter by rows over the ranks of a shard group."""

import contextlib
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mamba_fsdp.parallel.model import ParallelModel, ParameterSlot, ShardLayout
from mamba_fsdp.parallel.world import World


class FSDP2Model(ParallelModel):
    def accumulate(self, last: bool) -> contextlib.AbstractContextManager:
        """Returns the context for the forward and backward pass of one micro-batch.

        Each micro-batch reduces its gradients over the shard group, and the last one also across the groups. With
        no_sync, each rank sums whole gradients in fp32, and only the last micro-batch reduces them."""
        self.module.set_requires_gradient_sync(last or not self.no_sync)
        self.module.set_requires_all_reduce(last)
        return contextlib.nullcontext()

    def reduce_gradients(self) -> None:
        """Makes every gradient the sum over all ranks. FSDP2 has already summed the gradients of sharded parameters; here,
        the local part of each of them is moved to the tensor that the optimizer updates. The gradients of replicated
        parameters are summed here."""
        for slot in self.sharded:
            gradient = slot.parameter.grad
            slot.parameter.grad = None
            slot.local.grad = None if gradient is None else gradient.to_local()
        super().reduce_gradients()


def shard(
    model: nn.Module,
    slots: list[ParameterSlot],
    replicated: list[ParameterSlot],
    *,
    world: World,
    shard_size: int,
    compute_dtype: torch.dtype,
    accumulate_unsharded: bool,
) -> ParallelModel:
    """Shards all parameters except `replicated` over groups of `shard_size` neighbouring ranks. If there are several
    groups, each of them has a replica."""
    mesh = _mesh(world, shard_size)
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    ignored = {slot.parameter for slot in replicated}
    for unit in [*model.backbone.layers, model]:
        fully_shard(unit, mesh=mesh, mp_policy=policy, ignored_params=ignored)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)

    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=world.device)
    parts = {slot: _local_part(slot, shard_size) for slot in slots if slot not in replicated}
    return FSDP2Model(model, model, world, slots, parts=parts, no_sync=accumulate_unsharded)


def _mesh(world: World, shard_size: int) -> DeviceMesh:
    """Returns the mesh of the ranks. It has one dimension if there is one shard group. Otherwise it is a grid: a row is
    a shard group, and the ranks of a column have the same shard."""
    device = world.device.type
    if shard_size == world.size:
        return DeviceMesh.from_group(dist.group.WORLD, device, mesh_dim_names=("shard",))
    row, column = world.grid(shard_size)
    ranks = torch.arange(world.size).view(-1, shard_size)
    return DeviceMesh.from_group(
        [column, row], device, ranks, mesh_dim_names=("replicate", "shard")
    )


def _local_part(slot: ParameterSlot, shard_size: int) -> tuple[nn.Parameter, ShardLayout]:
    """Returns (this rank's part of a parameter, the parameter's layout). `fully_shard` splits rows like torch.chunk."""
    part = slot.parameter.detach().to_local()
    rows_per_part = math.ceil(slot.shape[0] / shard_size)
    return nn.Parameter(part), ShardLayout(shard_size, rows_per_part * math.prod(slot.shape[1:]))
