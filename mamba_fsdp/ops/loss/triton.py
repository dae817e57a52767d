"""Computes the loss of a chunk of tokens with the Triton kernel in triton_kernels.py. The kernel overwrites the logits
with their gradient, if this is wanted. The order of all sums depends only on sizes."""

import math

import torch
from torch import Tensor

from mamba_fsdp.ops import triton

why_unavailable = triton.why_unavailable
BLOCK = 8192  # the number of logits that a program holds in registers at a time


def _chunk_loss(
    logits: Tensor, labels: Tensor, token_weights: Tensor, want_gradient: bool
) -> Tensor:
    """Returns the sum of the losses of one chunk. With want_gradient, overwrites the logits with their gradient."""
    rows, vocab = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    if not logits.is_meta:
        from mamba_fsdp.ops.loss.triton_kernels import cross_entropy

        cross_entropy[(rows,)](
            logits,
            labels,
            token_weights,
            losses,
            vocab,
            MULTIPLE=math.gcd(vocab, 8),
            GRADIENT=want_gradient,
            BLOCK=BLOCK,
            num_warps=16,
        )
    return losses.sum()


chunk_loss = triton.operator(
    "chunk_loss(Tensor(a!) logits, Tensor labels, Tensor token_weights, bool want_gradient) -> Tensor",
    _chunk_loss,
    _chunk_loss,
)
