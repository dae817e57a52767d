"""Sharding with `fully_shard` (FSDP2): every parameter is cut by rows over the ranks of a shard group."""

import contextlib

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mamba_fsdp.parallel.model import LocalParameter, ParallelModel, starts_of


class FullyShard(ParallelModel):
    def accumulate(self, last):
        self.module.set_requires_gradient_sync(last)  # waiting gradients are kept in fp32
        return contextlib.nullcontext()

    def reduce_gradients(self):
        """Hand the local parts of the summed gradients to the plain tensors that the optimiser sees."""
        for local in self.local_parameters:
            parameter = local.slot.parameter
            if parameter is not local.parameter:
                local.parameter.grad = None if parameter.grad is None else parameter.grad.to_local()
                parameter.grad = None
        super().reduce_gradients()


def shard(model, slots, *, world, shard_size, compute_dtype, backward_prefetch, limit_all_gathers):
    """Shard over groups of `shard_size` neighbouring ranks and replicate across the groups.

    backward_prefetch: gather the next block's weights during the backward of this one (FSDP2's own default); without it
    a block is gathered when its turn comes. limit_all_gathers: FSDP2 needs no limit, since its memory does not depend
    on how far the CPU is ahead; without the limit, each block's gather is issued one block early in the forward pass.
    """
    shape, names = ((world.size // shard_size, shard_size), ("replicate", "shard"))
    if shape[0] == 1:
        shape, names = (shard_size,), ("shard",)
    mesh = init_device_mesh(world.device_type, shape, mesh_dim_names=names)
    kept_whole = [slot for slot in slots if slot.name in model.fp32_parameter_names()]
    for slot in kept_whole:
        slot.materialize(world.device)
    low = None if compute_dtype == torch.float32 else compute_dtype
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)

    blocks = list(model.backbone.layers)
    for unit in [*blocks, model]:
        fully_shard(unit, mesh=mesh, mp_policy=policy, ignored_params={slot.parameter for slot in kept_whole})
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    for block, following in zip(blocks, blocks[1:]):
        if not limit_all_gathers:
            block.set_modules_to_forward_prefetch([following])
    for block in blocks:
        if not backward_prefetch:
            block.set_modules_to_backward_prefetch([block])  # itself, which is there already: nothing ahead of time

    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=world.device)
    return FullyShard(model, model, world, *_local_parameters(slots, kept_whole, world, shard_size))


def _local_parameters(slots, kept_whole, world, shard_size):
    """(what this rank holds of every parameter, the part of it that is replicated outside the sharding)."""
    group = world.rank // shard_size
    local = [slot.parameter.detach().to_local() if slot not in kept_whole else None for slot in slots]
    sharded = [(slot, part) for slot, part in zip(slots, local) if part is not None]
    starts = starts_of([slot for slot, _ in sharded], [part.numel() for _, part in sharded],
                       list(range(group * shard_size, (group + 1) * shard_size)), world)
    local = {slot.name: LocalParameter(slot, nn.Parameter(part), start, world.size // shard_size, group)
             for (slot, part), start in zip(sharded, starts)}
    whole = {slot.name: LocalParameter(slot, slot.parameter, 0, world.size, world.rank) for slot in kept_whole}
    return [(local | whole)[slot.name] for slot in slots], list(whole.values())
