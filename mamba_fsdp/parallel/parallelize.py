"""Applies activation checkpointing, compilation and sharding to a model. All code that does this is called from here.

The order matters. Activation checkpointing comes first, so that the compiler sees the recomputation. Compilation comes
before sharding, so that the compiler does not trace the all-gather of weights. Sharding comes last and wraps a whole
block, so that the weights of the block are gathered together.
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
from mamba_fsdp.ops import attention, conv, fused, gdn, scan
from mamba_fsdp.parallel.compat import load_shard
from mamba_fsdp.parallel.context import ContextGroup
from mamba_fsdp.parallel.model import ParallelModel, ParameterSlot, find_slots
from mamba_fsdp.parallel.world import World
from mamba_fsdp.settings.train_config import ParallelConfig

# Under these strategies, operators receive the weights in the compute dtype.
SHARDED_STRATEGIES = ("fsdp", "hsdp")


def choose_strategy(settings: ParallelConfig, world: World) -> str:
    """Returns the strategy to use: none (one process), ddp (replicate), fsdp (shard over all ranks) or hsdp (shard
    within each node and replicate across nodes).

    Raises UserError for sharding_strategy=none with several ranks.
    """
    strategy = settings.sharding_strategy
    if strategy == "auto":
        return "fsdp" if world.size > 1 else "none"
    if strategy == "none" and world.size > 1:
        raise UserError(
            f"sharding_strategy=none is for one process, not {world.size}; choose ddp, fsdp or hsdp"
        )
    if strategy == "hsdp" and world.local_size == 1:
        return "ddp"  # equivalent here; FSDP1 would not sum gradients over shard groups of one rank
    return strategy


def parallelize(
    model: nn.Module,
    settings: ParallelConfig,
    *,
    world: World,
    compute_dtype: torch.dtype,
) -> ParallelModel:
    """Distributes `model` over the ranks as configured in `settings`.

    If the model is on the meta device, storage is allocated for this rank's part only. The content of this storage is
    undefined until `fill_shards` fills it. The parameters in `model.fp32_parameter_names()` are replicated and fp32 under every
    strategy. With hsdp, each node is a shard group.

    Raises UserError if the strategy does not fit the number of ranks, or if FSDP1 does not support the settings.
    """
    strategy = choose_strategy(settings, world)
    shard_size = world.local_size
    if strategy == "fsdp":
        shard_size = world.size
    if world.size % shard_size:
        raise UserError(
            f"sharding_strategy=hsdp: {world.size} ranks can't be divided into groups of {shard_size}; "
            "start the same number of processes on every node"
        )
    slots = find_slots(model)

    blocks = model.backbone.layers
    if settings.fsdp_activation_checkpointing:
        checkpoint_blocks(blocks, settings.selective_share())
    if settings.use_torch_compile:
        compile_blocks(blocks)

    replicated = slots
    if strategy in SHARDED_STRATEGIES:
        fp32 = model.fp32_parameter_names()
        replicated = [slot for slot in slots if slot.name in fp32]
    for slot in replicated:
        slot.materialize(world.device)
    if strategy == "none":
        return ParallelModel(model, model, world, slots, parts={})
    world.ensure_process_group()
    if strategy == "ddp":
        return _replicate(model, world, slots)
    return load_shard()(
        model,
        slots,
        replicated,
        world=world,
        shard_size=shard_size,
        compute_dtype=compute_dtype,
        accumulate_unsharded=settings.accumulate_unsharded,
    )


def checkpoint_blocks(blocks: Sequence[nn.Module], share: Fraction) -> None:
    """Makes some of the blocks recompute their activations in the backward pass. share: which fraction, in [0, 1]."""
    for block, recomputes in zip(blocks, select_recomputed(len(blocks), share)):
        if recomputes:
            block.forward = _checkpointed(block.forward)


def select_recomputed(count: int, share: Fraction) -> list[bool]:
    """Returns, for each of `count` blocks, whether it recomputes its activations.

    Block i, counted from 1, recomputes if one of the numbers 0.5, 1.5, 2.5, ... is above (i - 1) * share and at most
    i * share, as in fms-fsdp. This spreads the recomputing blocks evenly."""
    reached = [(index * share + Fraction(1, 2)) // 1 for index in range(count + 1)]
    return [before < after for before, after in zip(reached, reached[1:])]


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs)
        # A block does not use random numbers, so the state of random generators need not be saved and restored.
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)

    return run


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compiles the forward of each block separately, so that sharding stays outside of the compiled code.

    Equal blocks share their compiled code, except with torch 2.2: it compiles every block and, with its default limits,
    would run all blocks after the eighth uncompiled. The limits are therefore raised.
    """
    import torch._dynamo  # imported here because the import takes seconds and only compilation needs it

    exclude_from_compilation()
    limits = torch._dynamo.config
    enough = 8 * len(blocks)
    limits.cache_size_limit = max(enough, limits.cache_size_limit)
    limits.accumulated_cache_size_limit = max(enough, limits.accumulated_cache_size_limit)
    for block in blocks:
        block.forward = torch.compile(block.forward)


def exclude_from_compilation() -> None:
    """Excludes functions from compilation: C code, kernels of other libraries, loops over positions or documents, and
    communication between ranks. Compiled code calls these functions uncompiled."""
    # This is not done with a decorator, because torch.compiler takes seconds to import.
    for owner, name in (
        (conv.BACKENDS["cpp"], "causal_conv_silu"),
        (scan.BACKENDS["cpp"], "selective_scan"),
        (scan.BACKENDS["reference"], "selective_scan"),
        (gdn.BACKENDS["reference"], "gated_delta_rule"),
        (attention.BACKENDS["flash"], "packed_attention"),
        (attention.BACKENDS["reference"], "packed_attention"),
        (ContextGroup, "previous_inputs"),
        (ContextGroup, "entering_state"),
        (ContextGroup, "gather_sequence"),
        *((fused, name) for name in fused.FUNCTIONS),
    ):
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))


class DDPModel(ParallelModel):
    def reduce_gradients(self) -> None:
        """Does nothing: DistributedDataParallel has summed the gradients in the last backward pass."""


class FixedBuckets:
    """DDP's reducer, except that it does not rebuild its buckets after the first step of a process.

    With more than two ranks, the position of an element in its bucket decides the order of additions over the ranks. If
    the buckets were rebuilt, the first step after a restart would use other positions than the uninterrupted run, and
    its gradients would differ in the last bits.
    """

    def __init__(self, reducer: dist.Reducer) -> None:
        self.reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)


def _replicate(model: nn.Module, world: World, slots: list[ParameterSlot]) -> ParallelModel:
    # This hook sums gradients. DistributedDataParallel would also divide them by the number of ranks.
    def all_reduce_sum(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent = dist.all_reduce(bucket.buffer(), async_op=True)
        return sent.get_future().then(lambda done: done.value()[0])

    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    module.register_comm_hook(None, all_reduce_sum)
    module.reducer = FixedBuckets(module.reducer)
    return DDPModel(model, module, world, slots, parts={}, no_sync=True)
