"""The whole model on all ranks: on a single one (none), or kept equal by DistributedDataParallel (ddp)."""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mamba_fsdp.parallel.model import ParallelModel, ParameterSlot
from mamba_fsdp.parallel.world import World


class Replicated(ParallelModel):
    def reduce_gradients(self) -> None:
        """DistributedDataParallel has done this in the last backward."""


def replicate(model: nn.Module, slots: list[ParameterSlot], *, world: World, strategy: str) -> ParallelModel:
    """The ParallelModel of `model`, whose parameters are on the device, for strategy none or ddp."""
    if strategy == "none":
        return ParallelModel(model, model, world, slots, parts={})
    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    module.register_comm_hook(None, _sum)
    return Replicated(model, module, world, slots, parts={}, no_sync=True)


def _sum(_, bucket):
    """DDP's gradient traffic without its division by the number of ranks."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
