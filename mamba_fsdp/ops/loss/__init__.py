"""Computes the output layer and its loss in one operator, chunk by chunk, so that the logits of a whole batch never exist
at once.

loss = sum over counted tokens of w (logsumexp(W h) - (W h)[label]), with w = 1 by default. The gradient of a chunk's
logits, w (softmax - onehot), is known together with its loss, so the forward pass also computes the gradients of h
and W.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mamba_fsdp.conventions import compute_type
from mamba_fsdp.ops.backends import modules

BACKENDS = modules(__name__)
# Tokens whose logits exist at a time. Each chunk reads and writes the fp32 gradient of the weight once. On a GPU, chunks are
# larger, because there the time of these reads and writes matters more than the memory that smaller chunks save.
CHUNK = 1024
CHUNK_ON_GPU = 4096


def tokens_per_chunk(device_type: str) -> int:
    return CHUNK_ON_GPU if device_type == "cuda" else CHUNK


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, loss: Tensor, *gradients: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the saved gradients, multiplied by `grad`, which is in compute type. Only the products are rounded to
        the dtypes of hidden and weight, because fp16 can't hold 1 / tokens."""
        return (
            *(
                torch.mul(
                    values, grad.reshape(1), out=torch.empty_like(values, dtype=dtype)
                )  # `out` avoids a float32 copy
                for values, dtype in zip(ctx.saved_tensors, ctx.dtypes)
            ),
            None,
            None,
            None,
        )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor | None = None,
    *,
    chunk: int | None = None,
    backend: str = "reference",
) -> Tensor:
    """Returns the sum of the token losses of a language model's output layer, in nats, as a scalar in compute type.

    hidden (tokens, d_model); weight (vocab, d_model), cast to hidden's dtype; labels (tokens,) int64, -100 for a token
    that does not count; token_weights (tokens,), or None if all are 1; chunk: the number of tokens whose logits exist at a
    time, or None for the number that suits the device. Any other label outside the vocabulary is an error; in the Triton
    backend, it makes the loss NaN.
    """
    chunk = chunk or tokens_per_chunk(hidden.device.type)
    if token_weights is None:
        token_weights = torch.ones_like(labels, dtype=torch.float32)
    want_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.no_grad():
        cast_weight = weight.to(hidden.dtype)
        loss = hidden.new_zeros((), dtype=compute_type(hidden))
        # Both gradients are empty unless they are wanted. The weight's gradient is a sum over chunks, in compute type.
        grad_hidden = hidden.new_empty(hidden.shape if want_gradient else 0)
        grad_weight = loss.new_zeros(weight.shape if want_gradient else 0)
        for start in range(0, hidden.shape[0], chunk):
            span = slice(start, start + chunk)
            logits = hidden[span] @ cast_weight.T
            loss += BACKENDS[backend].chunk_loss(
                logits, labels[span], token_weights[span], want_gradient
            )
            if want_gradient:
                torch.mm(
                    logits, cast_weight, out=grad_hidden[span]
                )  # `logits` contains the gradient now
                if logits.dtype == grad_weight.dtype:
                    grad_weight.addmm_(logits.T, hidden[span])
                else:
                    grad_weight += logits.T @ hidden[span]
            del logits  # frees the memory before the logits of the next chunk are computed
    if not want_gradient:
        return loss
    return _WithGradients.apply(hidden, weight, loss, grad_hidden, grad_weight)
