"""The mean loss per token over a fixed set of windows."""

from collections.abc import Iterable

import torch

from mamba_fsdp.conventions import IGNORED_LABEL
from mamba_fsdp.data.loader import Batch
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.parallel.world import World


def evaluate(module: torch.nn.Module, batches: Iterable[Batch], world: World) -> float:
    """Mean of the token losses (nats) over the batches of all ranks.

    module: returns the sum of the token losses of a batch. batches: this rank's; all ranks need the same number, since
    each forward pass gathers sharded weights.
    """
    training = module.training
    module.eval()
    total, counted = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            heart.beat()
            here = batch.to(world.device)
            total += float(module(here.tokens, labels=here.labels, documents=here.documents))
            counted += int((batch.labels != IGNORED_LABEL).sum())
    module.train(training)
    total, tokens = world.all_reduce_sum([total, float(counted)])
    return total / max(tokens, 1)
