"""Turns a model into a parallel one; no other module does.

The order matters: activation checkpointing first, so that the compiler sees the recomputation; then compiling, so that
no gathering of weights is traced; then sharding, so that a block's weights are gathered once for the whole block.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mamba_fsdp.errors import UserError
from mamba_fsdp.ops import attention, conv, fused, gdn, loss, scan
from mamba_fsdp.parallel.compat import load_shard
from mamba_fsdp.parallel.context import ContextGroup
from mamba_fsdp.parallel.model import ParallelModel, ParameterSlot, find_slots
from mamba_fsdp.parallel.world import World
from mamba_fsdp.settings.train_config import ParallelConfig

# The strategies that hand weights to the operators in the run's precision.
SHARDING = ("fsdp", "hsdp")


def choose_strategy(settings: ParallelConfig, world: World) -> str:
    """Returns none (one process), ddp (replicate), fsdp (shard over all ranks) or hsdp (shard within nodes, replicate
    across them).

    Raises UserError if sharding_strategy does not fit the number of ranks.
    """
    strategy = settings.sharding_strategy
    if strategy == "auto":
        return "fsdp" if world.size > 1 else "none"
    if strategy == "none" and world.size > 1:
        raise UserError(
            f"sharding_strategy=none is for one process, not {world.size}; choose ddp, fsdp or hsdp"
        )
    if strategy == "hsdp" and world.local_size == 1:
        return "ddp"  # the same here, but FSDP1 would not sum over groups of one rank
    return strategy


def parallelize(
    model: nn.Module,
    settings: ParallelConfig,
    *,
    world: World,
    compute_dtype: torch.dtype,
) -> ParallelModel:
    """Returns `model` spread over the world as the settings say.

    A model on the meta device gets storage for this rank's part only, with undefined content; `fill_parts` fills it.
    The parameters of `model.fp32_parameter_names()` stay whole and fp32 under each strategy. The shard groups of hsdp
    are nodes. Raises UserError if the strategy does not fit the number of ranks.
    """
    strategy = choose_strategy(settings, world)
    shard_size = world.local_size
    if strategy == "fsdp":
        shard_size = world.size
    if world.size % shard_size:
        raise UserError(
            f"sharding_strategy=hsdp: {world.size} ranks can't be cut into groups of {shard_size}; "
            "start the same number of processes on every node"
        )
    slots = find_slots(model)

    blocks = model.backbone.layers
    if settings.fsdp_activation_checkpointing:
        checkpoint_blocks(blocks, settings.selective_share())
    if settings.use_torch_compile:
        compile_blocks(blocks, world.device)

    whole = slots
    if strategy in SHARDING:
        fp32 = model.fp32_parameter_names()
        whole = [slot for slot in slots if slot.name in fp32]
    for slot in whole:
        slot.materialize(world.device)
    if strategy == "none":
        return ParallelModel(model, model, world, slots, parts={})
    world.ensure_process_group()
    if strategy == "ddp":
        return _replicate(model, world, slots)
    return load_shard()(
        model,
        slots,
        whole,
        world=world,
        shard_size=shard_size,
        compute_dtype=compute_dtype,
        accumulate_unsharded=settings.accumulate_unsharded,
    )


def checkpoint_blocks(blocks: Sequence[nn.Module], share: Fraction) -> None:
    """Makes a share, in [0, 1], of the blocks recompute their activations in the backward pass."""
    for block, recomputes in zip(blocks, choose_recomputed(len(blocks), share)):
        if recomputes:
            block.forward = _checkpointed(block.forward)


def choose_recomputed(count: int, share: Fraction) -> list[bool]:
    """Returns, for each of `count` blocks, whether it recomputes: block i (from 1) does when i * share reaches 0.5,
    1.5, ..., as in fms-fsdp."""
    reached = [(index * share + Fraction(1, 2)) // 1 for index in range(count + 1)]
    return [before < after for before, after in zip(reached, reached[1:])]


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs)
        # Nothing in a block is random, so that no generator's state has to be kept.
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)

    return run


def compile_blocks(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Compiles each block's forward separately, so that sharding stays outside of it; on a GPU, also the loss of a
    chunk.

    Equal blocks share their compiled code. torch 2.2 compiles each block and, without a higher limit, would run all but
    8 uncompiled.
    """
    import torch._dynamo  # late: takes seconds, and only compiling needs it

    leave_uncompiled()
    limits = torch._dynamo.config
    enough = 8 * len(blocks)
    limits.cache_size_limit = max(enough, limits.cache_size_limit)
    limits.accumulated_cache_size_limit = max(enough, limits.accumulated_cache_size_limit)
    for block in blocks:
        block.forward = torch.compile(block.forward)
    if device.type == "cuda":  # uncompiled, the loss reads the logits seven times
        loss.on_device = torch.compile(loss.chunk_loss, dynamic=False)


def leave_uncompiled() -> None:
    """Keeps C code, the libraries' kernels, loops over positions or documents, and exchanges between ranks out of
    compiled graphs: a compiled block calls them."""
    # Not a decorator, because torch.compiler takes seconds to import.
    for owner, name in (
        (conv.BACKENDS["cpp"], "causal_conv_silu"),
        (scan.BACKENDS["cpp"], "selective_scan"),
        (scan.BACKENDS["reference"], "selective_scan"),
        (gdn.BACKENDS["reference"], "gated_delta_rule"),
        (attention.BACKENDS["flash"], "packed_attention"),
        (attention.BACKENDS["reference"], "packed_attention"),
        (ContextGroup, "inputs_before"),
        (ContextGroup, "entering_state"),
        (ContextGroup, "whole_sequence"),
        *((fused, name) for name in fused.FUNCTIONS),
    ):
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))


class DDPModel(ParallelModel):
    def reduce_gradients(self) -> None:
        """Does nothing: DistributedDataParallel has summed the gradients in the last backward pass."""


class FixedBuckets:
    """DDP's reducer, except that it never reorders its buckets, as it would after the first step of each start.

    An element's place in its bucket decides the order in which more than two ranks add it up. With reordering, the
    first step after a restart would differ from the uninterrupted run in the last bits.
    """

    def __init__(self, reducer: dist.Reducer) -> None:
        self.reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)


def _replicate(model: nn.Module, world: World, slots: list[ParameterSlot]) -> ParallelModel:
    # Sums without DistributedDataParallel's division by the number of ranks.
    def add_up(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent = dist.all_reduce(bucket.buffer(), async_op=True)
        return sent.get_future().then(lambda done: done.value()[0])

    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    module.register_comm_hook(None, add_up)
    module.reducer = FixedBuckets(module.reducer)
    return DDPModel(model, module, world, slots, parts={}, no_sync=True)
