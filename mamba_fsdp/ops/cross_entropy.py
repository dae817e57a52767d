"""The output layer and its loss in one operator, so that the logits of a batch never exist all at once.

loss = sum over counted tokens of w (logsumexp(W h) - (W h)[label]), w = 1 where none is given. The gradient of a
chunk's logits, w (softmax - onehot), is known with its loss: the forward pass makes gradients of h and W of it at once.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mamba_fsdp.conventions import IGNORED_LABEL, compute_type

CHUNK = 1024  # tokens whose logits exist at a time


def _chunk_loss(hidden, weight, labels, token_weights, want_gradient):
    """Loss of one chunk and, when wanted, the gradient of its logits in hidden's dtype."""
    logits = (hidden @ weight.T).to(compute_type(hidden))
    counted = labels != IGNORED_LABEL
    picked = labels.masked_fill(~counted, 0).unsqueeze(1)  # another label outside the vocabulary makes gather raise
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
    return loss, gradient.scatter_add_(1, picked, -counted.to(gradient.dtype)).to(hidden.dtype)


def _scaled(values, factor, dtype):
    """values * factor, a scalar in compute type, rounded to `dtype` afterwards: 1 / tokens is no number of fp16."""
    return torch.mul(values, factor.reshape(1), out=torch.empty_like(values, dtype=dtype))  # no float32 copy on a GPU


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, token_weights, chunk, want_gradient):
        cast_weight = weight.to(hidden.dtype)
        loss = torch.zeros((), dtype=compute_type(hidden), device=hidden.device)
        if want_gradient:
            grad_hidden = torch.empty_like(hidden)
            grad_weight = torch.zeros_like(weight, dtype=loss.dtype)
        for start in range(0, hidden.shape[0], chunk):
            span = slice(start, start + chunk)
            chunk_loss, grad_logits = _chunk_loss(hidden[span], cast_weight, labels[span],
                                                  None if token_weights is None else token_weights[span],
                                                  want_gradient)
            loss += chunk_loss
            if want_gradient:
                torch.mm(grad_logits, cast_weight, out=grad_hidden[span])
                if grad_logits.dtype == grad_weight.dtype:
                    grad_weight.addmm_(grad_logits.T, hidden[span])
                else:
                    grad_weight += grad_logits.T @ hidden[span]
        if want_gradient:
            ctx.save_for_backward(grad_hidden, grad_weight)
            ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_hidden, grad_weight = ctx.saved_tensors
        return (_scaled(grad_hidden, grad, grad_hidden.dtype), _scaled(grad_weight, grad, ctx.weight_dtype),
                None, None, None, None)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor | None = None, *,
                         chunk: int = CHUNK) -> Tensor:
    """Sum of the token losses of a language model's output layer, in nats, as a float32 scalar.

    hidden (tokens, d_model); weight (vocab, d_model), cast to hidden's dtype; labels (tokens,) int64, -100 for a token
    that is not counted; token_weights (tokens,) or None for 1; chunk: tokens whose logits exist at a time.
    """
    want_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(hidden, weight, labels, token_weights, chunk, want_gradient)
