"""The one place that turns a model into a parallel one.

The order matters: activation checkpointing first, so that compiling sees what is recomputed; then compile, so that no
gathering of weights is traced; then shard, so that a block's weights are gathered once around all of it.
"""

import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.parallel.blocks import checkpoint_blocks, compile_blocks
from mamba_fsdp.parallel.compat import HAS_FSDP2
from mamba_fsdp.parallel.model import find_slots
from mamba_fsdp.parallel.replicate import replicate

STRATEGIES = ("none", "ddp", "fsdp", "hsdp")


def parallelize(model, *, world, strategy, compute_dtype, activation_checkpointing=False, selective_checkpointing=1,
                reentrant=False, compile=False, backward_prefetch=True, limit_all_gathers=False, low_cpu_fsdp=True,
                shard_size=None):
    """Spread `model` (on the meta device with low_cpu_fsdp, else on the CPU) over the world; returns a ParallelModel.

    With low_cpu_fsdp it gets storage for this rank's part only, and what is in it is undefined: `fill` it.
    strategy: none (one process), ddp (replicate), fsdp (shard over all), hsdp (shard within groups of shard_size ranks,
    by default those of a node, and replicate across). The parameters of `model.fp32_parameter_names()` stay whole and
    fp32 under each. backward_prefetch, limit_all_gathers: see fsdp1.py and fsdp2.py. Raises UserError where the
    strategy does not fit the number of ranks.
    """
    if strategy not in STRATEGIES:
        raise UserError(f"sharding_strategy {strategy!r} is none of {', '.join(STRATEGIES)}")
    if strategy == "none" and world.size > 1:
        raise UserError(f"sharding_strategy=none is for one process, not {world.size}; choose ddp, fsdp or hsdp")
    shard_size = world.size if strategy == "fsdp" else shard_size or world.local_size
    if world.size % shard_size:
        raise UserError(f"sharding_strategy=hsdp: {world.size} ranks can't be cut into groups of {shard_size}; "
                        "start the same number of processes on every node")
    if strategy == "hsdp" and shard_size == 1:
        strategy = "ddp"  # the same thing by definition; FSDP1 would leave out the sum over such groups
    assert all(parameter.is_meta == low_cpu_fsdp for parameter in model.parameters()), "low_cpu_fsdp means: on meta"
    slots = find_slots(model)

    blocks = model.backbone.layers
    if activation_checkpointing:
        checkpoint_blocks(blocks, selective_checkpointing, reentrant=reentrant)
    if compile:
        compile_blocks(blocks)

    if strategy != "none":
        world.need_process_group()
    if strategy in ("none", "ddp"):
        return replicate(model, slots, world=world, strategy=strategy)
    if HAS_FSDP2:
        from mamba_fsdp.parallel.fsdp2 import shard
    else:
        from mamba_fsdp.parallel.fsdp1 import shard
    fp32 = model.fp32_parameter_names()
    whole = [slot for slot in slots if slot.name in fp32]
    for slot in whole:
        slot.materialize(world.device)
    return shard(model, slots, whole, world=world, shard_size=shard_size, compute_dtype=compute_dtype,
                 backward_prefetch=backward_prefetch, limit_all_gathers=limit_all_gathers)


def fill(shards, value_of):
    """Set every shard from `value_of(name, shape)`, a full CPU tensor. Only one full tensor is held at a time."""
    def part_of(name, shape, start, stop):
        value = value_of(name, shape)
        assert value.shape == torch.Size(shape), f"{name}: {value.shape} is not {shape}"
        return value.reshape(-1)[start:stop]

    fill_parts(shards, part_of)


@torch.no_grad()
def fill_parts(shards, part_of):
    """Set every shard from `part_of(name, shape, start, stop)`, the elements [start, stop) of the flattened tensor."""
    for shard in shards:
        if shard.data.numel():
            shard.data.copy_(part_of(shard.name, shard.shape, shard.start, shard.start + shard.data.numel()))
            heart.beat()
