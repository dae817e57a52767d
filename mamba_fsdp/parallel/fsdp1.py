"""Shards with FullyShardedDataParallel (FSDP1, torch 2.2), which cuts a block's flattened parameters in equal
parts."""

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.model import Cut, ParallelModel, ParameterSlot
from mamba_fsdp.parallel.world import World


class FSDP1Model(ParallelModel):
    def reduce_gradients(self) -> None:
        """Makes every gradient the sum over all ranks: undoes FSDP1's division by the number of ranks, which is exact
        for a power of two, and sums the gradients of whole parameters."""
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
    accumulate_unsharded: bool,
) -> ParallelModel:
    """Returns the model with all parameters but `whole` sharded over groups of `shard_size` neighbouring ranks and
    replicated across the groups.

    Raises UserError for accumulate_unsharded with a half-precision compute_dtype: FSDP1 would sum the gradients in it.
    """
    low_dtype = None if compute_dtype == torch.float32 else compute_dtype
    if low_dtype and accumulate_unsharded:
        raise UserError(
            f"accumulate_unsharded=true: torch {torch.__version__} would sum gradients in {low_dtype}; "
            "leave out accumulate_unsharded, or set mixed_precision=fp32"
        )
    slot_of = {owner: slot for slot in slots for owner in slot.owners}

    def give_storage(module: nn.Module) -> None:
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                slot_of[module, attribute].materialize(world.device)

    options = dict(
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(
            param_dtype=low_dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
            cast_root_forward_inputs=False,
        ),
        ignored_states=[slot.parameter for slot in whole],
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        limit_all_gathers=True,
        param_init_fn=give_storage,
        device_id=world.device,
        use_orig_params=True,
    )
    if shard_size < world.size:
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        options["process_group"] = world.grid(shard_size)
    blocks = model.backbone.layers
    for index, block in enumerate(blocks):
        blocks[index] = FullyShardedDataParallel(block, **options)
    module = FullyShardedDataParallel(model, **options)

    cuts = _cuts(module, shard_size)
    sharded = [slot for slot in slots if slot not in whole]
    parts = {slot: (slot.parameter, cuts[slot.owners[0]]) for slot in sharded}
    return FSDP1Model(
        model,
        module,
        world,
        slots,
        parts=parts,
        no_sync=accumulate_unsharded,
    )


def _cuts(module: nn.Module, shard_size: int) -> dict[tuple[nn.Module, str], Cut]:
    """Returns {(owner, attribute): the parameter's Cut}. FSDP1 concatenates a unit's parameters, some with padding
    between them, and cuts the result in equal parts; only its internals know where."""
    cuts = {}
    for unit in FullyShardedDataParallel.fsdp_modules(module):
        flat = unit._handle.flat_param
        places = zip(unit._handle._get_flat_param_offsets(), flat._is_padding_mask)
        offsets = [start for (start, _), is_padding in places if not is_padding]
        for info, offset in zip(flat._param_infos, offsets):
            cuts[info.module, info.param_name] = Cut(shard_size, flat.numel(), -offset)
    return cuts
