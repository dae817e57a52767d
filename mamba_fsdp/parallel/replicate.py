"""The whole model on every rank: alone (none) or kept equal by DistributedDataParallel (ddp)."""

import contextlib

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mamba_fsdp.parallel.model import LocalParameter, ParallelModel


class Replicated(ParallelModel):
    def accumulate(self, last):
        return contextlib.nullcontext() if last or self.module is self.model else self.module.no_sync()


def replicate(model, slots, *, world, strategy):
    for slot in slots:
        slot.materialize(world.device)
    module = model
    if strategy == "ddp":
        module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        module.register_comm_hook(None, _sum)
    local = [LocalParameter(slot, slot.parameter, replicas=world.size, replica_index=world.rank) for slot in slots]
    return Replicated(model, module, world, local)


def _sum(_, bucket):
    """DDP's gradient traffic without its division by the number of ranks."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
