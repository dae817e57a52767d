"""Sharding with FullyShardedDataParallel (FSDP1, torch 2.2): a block's flattened parameters are cut in equal parts."""

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.model import ParallelModel, ParameterSlot
from mamba_fsdp.parallel.world import World


class FlatShard(ParallelModel):
    def reduce_gradients(self) -> None:
        """FSDP1 always averages: undo its division (exact where the number of ranks is a power of two)."""
        averaged = [slot.local.grad for slot in self.sharded if slot.local.grad is not None]
        if averaged and self.world.size > 1:
            torch._foreach_mul_(averaged, self.world.size)
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

    backward_prefetch and limit_all_gathers are FSDP1's own: gather the next block's weights during the backward of this
    one; make the CPU wait rather than gather more than two blocks ahead. Raises UserError for accumulate_unsharded
    with a low compute_dtype: FSDP1 would sum the gradients in that dtype.
    """
    low = None if compute_dtype == torch.float32 else compute_dtype
    if low and accumulate_unsharded:
        raise UserError(
            f"accumulate_unsharded=true: torch {torch.__version__} would sum gradients in {low}; leave out "
            "accumulate_unsharded, or set mixed_precision=fp32"
        )
    slot_of = {owner: slot for slot in slots for owner in slot.owners}

    def give_storage(module):
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                slot_of[module, attribute].materialize(world.device)

    replicas = world.size // shard_size
    options = dict(
        sharding_strategy=ShardingStrategy.HYBRID_SHARD
        if replicas > 1
        else ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(
            param_dtype=low,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
            cast_root_forward_inputs=False,
        ),
        ignored_states=[slot.parameter for slot in whole],
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE if backward_prefetch else None,
        limit_all_gathers=limit_all_gathers,
        param_init_fn=give_storage,
        device_id=world.device,
        use_orig_params=True,
        process_group=world.grid(shard_size) if replicas > 1 else None,
    )
    blocks = model.backbone.layers
    for index, block in enumerate(blocks):
        blocks[index] = FullyShardedDataParallel(block, **options)
    module = FullyShardedDataParallel(model, **options)

    flats = [unit._handle.flat_param for unit in FullyShardedDataParallel.fsdp_modules(module)]
    starts = {
        (info.module, info.param_name): cut.intra_param_start_idx
        or 0  # None where this rank has none of it
        for flat in flats
        for info, cut in zip(flat._param_infos, flat._shard_param_infos)
    }
    parts = {slot: (slot.parameter, starts[slot.owners[0]]) for slot in slots if slot not in whole}
    return FlatShard(
        model,
        module,
        world,
        slots,
        parts=parts,
        shard_size=shard_size,
        no_sync=accumulate_unsharded,
    )
