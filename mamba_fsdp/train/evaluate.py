"""The mean loss per token over a fixed set of windows."""

import torch


def evaluate(module, batches, world):
    """Mean of the token losses (nats) over the batches of all ranks.

    module: called with (tokens, labels=..., documents=...) gives the sum of the token losses. batches: this rank's;
    every rank must bring the same number, since sharded weights are gathered in each forward pass.
    """
    training = module.training
    module.eval()
    total, counted = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            labels = batch.labels.to(world.device)
            documents = None if batch.documents is None else batch.documents.to(world.device)
            total += float(module(batch.tokens.to(world.device), labels=labels, documents=documents))
            counted += int((batch.labels != -100).sum())
    module.train(training)
    total, counted = world.all_reduce_sum([total, float(counted)])
    return total / max(counted, 1)
