"""The kernel of the loss, one program for each token."""

import triton
import triton.language as tl


@triton.jit
def cross_entropy(
    logits,
    labels,
    token_weights,
    losses,
    vocab,
    IGNORED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """logits (tokens, vocab) -> losses (tokens) and, in the logits' place, their gradient: two reads, the second from
    the cache, and one write. A label outside the vocabulary makes both NaN."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    label = tl.load(labels + row)
    known = (label >= 0) & (label < vocab)
    at_label = tl.load(logits + label, mask=known, other=0.0).to(tl.float32)
    weight = tl.where(known, 1.0, float("nan"))
    if token_weights is not None:
        weight *= tl.load(token_weights + row).to(tl.float32)
    weight = tl.where(label == IGNORED, 0.0, weight)

    columns = tl.arange(0, BLOCK)
    largest = float("-inf")
    totals = tl.zeros([BLOCK], tl.float32)  # by place in the block, of exp(logit - largest)
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        values = tl.load(logits + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(values, 0))
        totals = totals * tl.exp(largest - larger) + tl.exp(values - larger)
        largest = larger
    total = tl.sum(totals, 0)
    loss = tl.where(label == IGNORED, 0.0, weight * (tl.log(total) + (largest - at_label)))
    tl.store(losses + row, loss)

    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            values = tl.load(logits + start + columns, mask=inside, other=0.0).to(tl.float32)
            gradient = tl.exp(values - largest) * (weight / total)
            gradient = tl.where(start + columns == label, gradient - weight, gradient)
            tl.store(logits + start + columns, gradient.to(logits.dtype.element_ty), mask=inside)
