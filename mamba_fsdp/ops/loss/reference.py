"""Computes the loss of a chunk of tokens in plain PyTorch."""

import torch
from torch import Tensor

from mamba_fsdp.conventions import IGNORED_LABEL, compute_type


def chunk_loss(
    logits: Tensor, labels: Tensor, token_weights: Tensor, want_gradient: bool
) -> Tensor:
    """Returns the sum of the losses of one chunk. The logits are overwritten. With want_gradient, they contain their
    gradient afterwards."""
    values = logits.to(compute_type(logits))
    counted = labels != IGNORED_LABEL
    # `gather` raises an error for any other label outside the vocabulary.
    picked = labels.masked_fill(~counted, 0).unsqueeze(1)
    label_logits = values.gather(1, picked)
    largest = values.amax(1, keepdim=True)
    exponentials = values.sub_(largest).exp_()
    total = exponentials.sum(1, keepdim=True)
    counted = counted.unsqueeze(1)
    losses = torch.where(counted, total.log() + largest - label_logits, 0.0)
    weights = counted * token_weights.unsqueeze(1).to(losses.dtype)
    if want_gradient:
        gradient = exponentials.mul_(weights / total).scatter_add_(1, picked, -weights)
        logits.copy_(gradient)
    return (losses * weights).sum()
