"""Shards a model with FullyShardedDataParallel (FSDP1), for torch 2.2. FSDP1 concatenates the flattened parameters of
a block and splits the result into equal parts."""

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.model import ParallelModel, ParameterSlot, ShardLayout
from mamba_fsdp.parallel.world import World


class FSDP1Model(ParallelModel):
    def reduce_gradients(self) -> None:
        """Makes every gradient the sum over all ranks.

        FSDP1 has summed the gradients of sharded parameters and divided the sums by the number of ranks. Here, they are
        multiplied by this number again. This is exact if the number is a power of two. The gradients of replicated
        parameters are summed here."""
        averaged = [slot.local.grad for slot in self.sharded if slot.local.grad is not None]
        if averaged and self.world.size > 1:
            torch._foreach_mul_(averaged, self.world.size)
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
    groups, each of them has a replica.

    Raises UserError for accumulate_unsharded with a half-precision compute_dtype, because FSDP1 would sum the gradients
    of micro-batches in this dtype.
    """
    low_dtype = None if compute_dtype == torch.float32 else compute_dtype
    if low_dtype and accumulate_unsharded:
        raise UserError(
            f"accumulate_unsharded=true: torch {torch.__version__} would sum gradients in {low_dtype}; "
            "leave out accumulate_unsharded, or set mixed_precision=fp32"
        )
    slot_of = {owner: slot for slot in slots for owner in slot.owners}

    def initialize_parameters(module: nn.Module) -> None:
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
        ignored_states=[slot.parameter for slot in replicated],
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        limit_all_gathers=True,
        param_init_fn=initialize_parameters,
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

    layouts = _find_layouts(module, shard_size)
    sharded = [slot for slot in slots if slot not in replicated]
    parts = {slot: (slot.parameter, layouts[slot.owners[0]]) for slot in sharded}
    return FSDP1Model(
        model,
        module,
        world,
        slots,
        parts=parts,
        no_sync=accumulate_unsharded,
    )


def _find_layouts(module: nn.Module, shard_size: int) -> dict[tuple[nn.Module, str], ShardLayout]:
    """Returns {(owner, attribute): layout} for the sharded parameters. FSDP1 concatenates the parameters of a unit,
    with padding between some of them, and splits the result into equal parts. The offsets of parameters are available
    only in private attributes of FSDP1."""
    layouts = {}
    for unit in FullyShardedDataParallel.fsdp_modules(module):
        flat = unit._handle.flat_param
        places = zip(unit._handle._get_flat_param_offsets(), flat._is_padding_mask)
        offsets = [start for (start, _), is_padding in places if not is_padding]
        for info, offset in zip(flat._param_infos, offsets):
            layouts[info.module, info.param_name] = ShardLayout(shard_size, flat.numel(), -offset)
    return layouts
