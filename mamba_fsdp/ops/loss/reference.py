"""The output layer and its loss in plain PyTorch, chunk by chunk of the tokens."""

import torch

from mamba_fsdp.conventions import IGNORED_LABEL, compute_type

CHUNK = 1024  # tokens whose logits exist at a time


def _chunk_loss(logits, labels, token_weights, want_gradient):
    """Loss of one chunk and, when wanted, the gradient of its logits in their dtype."""
    dtype = logits.dtype
    logits = logits.to(compute_type(logits))
    counted = labels != IGNORED_LABEL
    picked = labels.masked_fill(~counted, 0).unsqueeze(
        1
    )  # another label outside the vocabulary makes gather raise
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
    return loss, gradient.scatter_add_(1, picked, -counted.to(gradient.dtype)).to(dtype)


def in_chunks(chunk_loss, hidden, weight, labels, token_weights, want_gradient, chunk):
    """(loss, gradient of hidden, gradient of weight in compute type), the gradients empty where none is wanted, with
    chunk_loss(logits, labels, token_weights, want_gradient) for each `chunk` of tokens."""
    cast_weight = weight.to(hidden.dtype)
    loss = torch.zeros((), dtype=compute_type(hidden), device=hidden.device)
    grad_hidden = hidden.new_empty(hidden.shape if want_gradient else 0)
    grad_weight = torch.zeros(
        weight.shape if want_gradient else 0, dtype=loss.dtype, device=hidden.device
    )
    for start in range(0, hidden.shape[0], chunk):
        span = slice(start, start + chunk)
        part, grad_logits = chunk_loss(
            hidden[span] @ cast_weight.T,
            labels[span],
            None if token_weights is None else token_weights[span],
            want_gradient,
        )
        loss += part
        if want_gradient:
            torch.mm(grad_logits, cast_weight, out=grad_hidden[span])
            if grad_logits.dtype == grad_weight.dtype:
                grad_weight.addmm_(grad_logits.T, hidden[span])
            else:
                grad_weight += grad_logits.T @ hidden[span]
    return loss, grad_hidden, grad_weight


def loss_and_gradients(*inputs):
    return in_chunks(_chunk_loss, *inputs[:-1], inputs[-1] or CHUNK)
