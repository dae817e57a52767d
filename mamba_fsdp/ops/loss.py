"""Computes the output layer and its loss in one operator, which goes through the tokens in chunks: the logits of a
whole batch never exist at once.

loss = sum over counted tokens of w (logsumexp(W h) - (W h)[label]), with w = 1 by default. The gradient of a chunk's
logits, w (softmax - onehot), is known together with its loss, so that the forward pass also computes the gradients of h
and W.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mamba_fsdp.conventions import IGNORED_LABEL, compute_type

# Tokens whose logits exist at a time. For each chunk, the fp32 gradient of the weight is read and written once; on a GPU
# that would take longer than it is worth to save memory.
CHUNK = 1024
CHUNK_ON_GPU = 4096


def chunk_loss(
    logits: Tensor, labels: Tensor, token_weights: Tensor | None, want_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the loss of one chunk and, if wanted, the gradient of its logits in their dtype, else None. On a GPU, the
    setting use_torch_compile puts the compiled function into `on_device`."""
    dtype = logits.dtype
    logits = logits.to(compute_type(logits))
    counted = labels != IGNORED_LABEL
    picked = labels.masked_fill(~counted, 0).unsqueeze(
        1
    )  # any other label outside the vocabulary makes gather raise
    label_logits = logits.gather(1, picked)
    largest = logits.amax(1, keepdim=True)
    exponentials = logits.sub_(largest).exp_()
    total = exponentials.sum(1, keepdim=True)
    counted = counted.unsqueeze(1)
    losses = torch.where(counted, total.log() + largest - label_logits, 0.0)
    if token_weights is not None:
        counted = counted * token_weights.unsqueeze(1).to(losses.dtype)
        losses = losses * counted
    loss = losses.sum()
    if not want_gradient:
        return loss, None
    gradient = exponentials.mul_(counted / total)
    # On a GPU, a deterministic scatter_add_ makes the host wait.
    if torch.are_deterministic_algorithms_enabled():
        of_label = gradient.gather(1, picked) - counted.to(gradient.dtype)
        tokens = torch.arange(logits.shape[1], device=logits.device)
        torch.where(picked == tokens, of_label, gradient, out=gradient)
    else:
        gradient.scatter_add_(1, picked, -counted.to(gradient.dtype))
    return loss, gradient.to(dtype)


on_device = chunk_loss


def _in_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor | None,
    want_gradient: bool,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (loss, gradient of hidden, gradient of weight in compute type). The gradients are empty unless wanted."""
    cast_weight = weight.to(hidden.dtype)
    loss = torch.zeros((), dtype=compute_type(hidden), device=hidden.device)
    grad_hidden = hidden.new_empty(hidden.shape if want_gradient else 0)
    grad_weight = torch.zeros(
        weight.shape if want_gradient else 0, dtype=loss.dtype, device=hidden.device
    )
    # Planning measures on the meta device, of which the compiler knows nothing.
    compute = chunk_loss if hidden.is_meta else on_device
    for start in range(0, hidden.shape[0], chunk):
        span = slice(start, start + chunk)
        part, grad_logits = compute(
            hidden[span] @ cast_weight.T,
            labels[span],
            None if token_weights is None else token_weights[span],
            want_gradient,
        )
        loss += part
        if grad_logits is not None:
            torch.mm(grad_logits, cast_weight, out=grad_hidden[span])
            if grad_logits.dtype == grad_weight.dtype:
                grad_weight.addmm_(grad_logits.T, hidden[span])
            else:
                grad_weight += grad_logits.T @ hidden[span]
        del grad_logits  # before the next chunk's logits
    return loss, grad_hidden, grad_weight


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
        """Returns the gradients times `grad`, which is in compute type; they are rounded after the product, because
        fp16 can't hold 1 / tokens."""
        return (
            *(
                torch.mul(
                    values, grad.reshape(1), out=torch.empty_like(values, dtype=dtype)
                )  # no float32 copy
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
) -> Tensor:
    """Returns the sum of the token losses of a language model's output layer, in nats, as a float32 scalar.

    hidden (tokens, d_model); weight (vocab, d_model), cast to hidden's dtype; labels (tokens,) int64, -100 for a token
    that does not count; token_weights (tokens,), or None for 1; chunk: tokens whose logits exist at a time, or None for
    as many as suit the device. A label outside the vocabulary is an error.
    """
    chunk = chunk or tokens_per_chunk(hidden.device.type)
    want_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.no_grad():
        loss, *gradients = _in_chunks(hidden, weight, labels, token_weights, want_gradient, chunk)
    return _WithGradients.apply(hidden, weight, loss, *gradients) if want_gradient else loss
