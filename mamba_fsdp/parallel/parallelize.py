"""The one place that turns a model into a parallel one.

The order matters: activation checkpointing first, so that compiling sees what is recomputed; then compile, so that no
gathering of weights is traced; then shard, so that a block's weights are gathered once around all of it.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from config.train_config import ParallelConfig
from mamba_fsdp.errors import UserError
from mamba_fsdp.ops import conv, scan
from mamba_fsdp.parallel.compat import load_shard
from mamba_fsdp.parallel.model import ParallelModel, ParameterSlot, find_slots
from mamba_fsdp.parallel.world import World


def choose_strategy(settings: ParallelConfig, world: World) -> str:
    """none (one process), ddp (replicate), fsdp (shard over all ranks) or hsdp (shard within groups, replicate across).

    Raises UserError where sharding_strategy is none of them or does not fit the number of ranks.
    """
    strategy = settings.sharding_strategy
    if strategy == "auto":
        return "fsdp" if world.size > 1 else "none"
    if strategy not in ("none", "ddp", "fsdp", "hsdp"):
        raise UserError(f"sharding_strategy {strategy!r} is none of auto, none, ddp, fsdp, hsdp")
    if strategy == "none" and world.size > 1:
        raise UserError(
            f"sharding_strategy=none is for one process, not {world.size}; choose ddp, fsdp or hsdp"
        )
    return strategy


def parallelize(
    model: nn.Module,
    settings: ParallelConfig,
    *,
    world: World,
    compute_dtype: torch.dtype,
    shard_size: int | None = None,
) -> ParallelModel:
    """Spread `model` (on the meta device with low_cpu_fsdp, else on the CPU) over the world as the settings say.

    With low_cpu_fsdp it gets storage for this rank's part only, and what is in it is undefined: `fill_parts` it. The
    parameters of `model.fp32_parameter_names()` stay whole and fp32 under each strategy. shard_size: ranks in a group
    of hsdp, by default those of a node. Raises UserError where the strategy does not fit the number of ranks.
    """
    strategy = choose_strategy(settings, world)
    shard_size = world.size if strategy == "fsdp" else shard_size or world.local_size
    if world.size % shard_size:
        raise UserError(
            f"sharding_strategy=hsdp: {world.size} ranks can't be cut into groups of {shard_size}; "
            "start the same number of processes on every node"
        )
    if strategy == "hsdp" and shard_size == 1:
        strategy = (
            "ddp"  # the same thing by definition; FSDP1 would leave out the sum over such groups
        )
    assert all(parameter.is_meta == settings.low_cpu_fsdp for parameter in model.parameters()), (
        "not where it should be"
    )
    slots = find_slots(model)

    blocks = model.backbone.layers
    if settings.fsdp_activation_checkpointing:
        checkpoint_blocks(
            blocks, settings.selective_share(), reentrant=settings.reentrant_checkpointing
        )
    if settings.use_torch_compile:
        compile_blocks(blocks)

    sharded, fp32 = strategy in ("fsdp", "hsdp"), model.fp32_parameter_names()
    whole = [slot for slot in slots if not sharded or slot.name in fp32]
    for slot in whole:
        slot.materialize(world.device)
    if strategy == "none":
        return ParallelModel(model, model, world, slots, parts={})
    world.need_process_group()
    if not sharded:
        return _replicate(model, world, slots)
    return load_shard()(
        model,
        slots,
        whole,
        world=world,
        shard_size=shard_size,
        compute_dtype=compute_dtype,
        backward_prefetch=settings.backward_prefetch,
        limit_all_gathers=settings.limit_all_gathers,
        accumulate_unsharded=settings.accumulate_unsharded,
    )


def checkpoint_blocks(blocks: Sequence[nn.Module], share: Fraction, *, reentrant: bool) -> None:
    """Let a share in [0, 1] of the blocks recompute their activations in the backward pass."""
    for block, chosen in zip(blocks, selected(len(blocks), share)):
        if chosen:
            block.forward = _checkpointed(block.forward, reentrant)


def selected(count: int, share: Fraction) -> list[bool]:
    """Which of `count` blocks recompute: block i (from 1) when i * share reaches 0.5, 1.5, 2.5, … (as fms-fsdp)."""
    reached = [(index * share + Fraction(1, 2)) // 1 for index in range(count + 1)]
    return [before < after for before, after in zip(reached, reached[1:])]


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block's forward by itself, so that sharding stays outside of it.

    Equal blocks share what is compiled; torch 2.2 compiles each one, and beyond 8 would run the rest uncompiled.
    """
    import torch._dynamo  # seconds of imports that only this needs

    leave_uncompiled()
    for limit in ("cache_size_limit", "accumulated_cache_size_limit"):
        setattr(
            torch._dynamo.config, limit, max(8 * len(blocks), getattr(torch._dynamo.config, limit))
        )
    for block in blocks:
        block.forward = torch.compile(block.forward)


def leave_uncompiled() -> None:
    """Keep C, and the scan's loop over positions, out of graphs: calls of their own within a compiled block."""
    for module, name in (
        (conv.FORMS["native"], "causal_conv_silu"),
        (scan.FORMS["native"], "selective_scan"),
        (scan.FORMS["portable"], "selective_scan"),
    ):
        setattr(
            module, name, torch.compiler.disable(getattr(module, name))
        )  # here, as it takes seconds of imports


def _checkpointed(forward, reentrant):
    def run(*inputs):
        if not torch.is_grad_enabled():
            return forward(*inputs)
        return checkpoint(
            forward, *inputs, use_reentrant=reentrant, preserve_rng_state=False
        )  # nothing random inside

    return run


class Replicated(ParallelModel):
    def reduce_gradients(self) -> None:
        """DistributedDataParallel has done this in the last backward."""


class KeptBuckets:
    """DDP's reducer, but that it keeps its first buckets. By itself it orders them anew after the first step of each
    start: where more than two ranks add up, the first step after a break would differ from the unbroken run's in the
    last bits, since an element's place in its bucket says in which order."""

    def __init__(self, reducer: dist.Reducer) -> None:
        self.reducer, self._rebuild_buckets = reducer, lambda: False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)


def _replicate(model: nn.Module, world: World, slots: list[ParameterSlot]) -> ParallelModel:
    def add_up(_, bucket):  # without DistributedDataParallel's division by the number of ranks
        return (
            dist.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda done: done.value()[0])
        )

    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    module.register_comm_hook(None, add_up)
    module.reducer = KeptBuckets(module.reducer)
    return Replicated(model, module, world, slots, parts={}, no_sync=True)
