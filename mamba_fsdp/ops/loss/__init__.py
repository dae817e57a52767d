"""The output layer and its loss in one operator, so that the logits of a batch never exist all at once.

loss = sum over counted tokens of w (logsumexp(W h) - (W h)[label]), w = 1 where none is given. The gradient of a
chunk's logits, w (softmax - onehot), is known with its loss: the forward pass makes gradients of h and W of it at once.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mamba_fsdp.ops.backends import modules

BACKENDS = modules(__name__)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, loss, *gradients):
        ctx.save_for_backward(*gradients)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """`grad` is in compute type, and rounding comes afterwards: 1 / tokens is no number of fp16."""
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
    chunk: int = 0,
    backend: str = "reference",
) -> Tensor:
    """Sum of the token losses of a language model's output layer, in nats, as a float32 scalar.

    hidden (tokens, d_model); weight (vocab, d_model), cast to hidden's dtype; labels (tokens,) int64, -100 for a token
    that is not counted; token_weights (tokens,) or None for 1; chunk: tokens whose logits exist at a time, 0 for the
    backend's own. A label outside the vocabulary raises, or makes loss and gradients NaN, so that the step is refused.
    """
    want_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.no_grad():
        loss, *gradients = BACKENDS[backend].loss_and_gradients(
            hidden, weight, labels, token_weights, want_gradient, chunk
        )
    return _WithGradients.apply(hidden, weight, loss, *gradients) if want_gradient else loss
