"""The whole model on every rank: alone (none) or kept equal by DistributedDataParallel (ddp)."""

import contextlib

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mamba_fsdp.parallel.model import ParallelModel


class Replicated(ParallelModel):
    def accumulate(self, last):
        return contextlib.nullcontext() if last or self.module is self.model else self.module.no_sync()

    def reduce_gradients(self):
        """DistributedDataParallel has done so in the last backward."""


def replicate(model, slots, *, world, strategy):
    for slot in slots:
        slot.materialize(world.device)
    module = model
    if strategy == "ddp":
        module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        module.register_comm_hook(None, _sum)
    return Replicated(model, module, world, slots, parts={})


def _sum(_, bucket):
    """DDP's gradient traffic without its division by the number of ranks."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
