"""The mean loss per token over a fixed set of windows."""

from collections.abc import Iterable

import torch

from mamba_fsdp.conventions import IGNORED_LABEL
from mamba_fsdp.data.loader import Batch
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.parallel.world import World


def evaluate(module: torch.nn.Module, batches: Iterable[Batch], world: World) -> float:
    """Mean of the token losses (nats) over the batches of all ranks.

    module: called with (tokens, labels=..., documents=...) gives the sum of the token losses. batches: this rank's;
    every rank must bring the same number, since sharded weights are gathered in each forward pass.
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
