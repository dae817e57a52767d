"""The kernel of the loss. A program computes one token. It reads the logits once for the maximum and the sum of the
exponentials, and once more for the gradient, which it writes in their place. It thus moves 6 bytes for each 2-byte logit."""

import triton
import triton.language as tl

from mamba_fsdp.conventions import IGNORED_LABEL
from mamba_fsdp.ops.triton import kernel

IGNORED = tl.constexpr(IGNORED_LABEL)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exp(x):
    return tl.math.exp2(x * LOG2E)


@kernel
def cross_entropy(
    logits,
    labels,
    token_weights,
    losses,
    vocab,
    MULTIPLE: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the loss of each token. With GRADIENT, overwrites the logits (tokens, vocab) with their gradient.

    MULTIPLE: a divisor of vocab, from which the compiler knows how rows are aligned.
    """
    row = tl.program_id(0).to(tl.int64)
    vocab = vocab // MULTIPLE * MULTIPLE
    logits += row * vocab
    label = tl.load(labels + row)
    is_token = (label >= 0) & (label < vocab)
    # A label outside the vocabulary makes the loss NaN, except IGNORED.
    label_logit = tl.load(logits + label, mask=is_token, other=float("nan")).to(tl.float32)
    weight = tl.where(label == IGNORED, 0.0, tl.load(token_weights + row))
    largest = float("-inf")
    total = 0.0
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        largest_yet = tl.maximum(largest, tl.max(x, 0))
        total = total * _exp(largest - largest_yet) + tl.sum(_exp(x - largest_yet), 0)
        largest = largest_yet
    loss = (tl.log(total) + largest - label_logit) * weight
    tl.store(losses + row, tl.where(label == IGNORED, 0.0, loss))
    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + column, mask=column < vocab, other=0.0).to(tl.float32)
            gradient = _exp(x - largest) * (weight / total)
            gradient -= tl.where(column == label, weight, 0.0)
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < vocab)
