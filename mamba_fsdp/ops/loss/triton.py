"""The output layer and its loss, with what lies between its matrix products in one Triton kernel.

The products stay the library's, the three that there must be: a kernel that takes the logits from one product into the
next without memory has to make them twice (once for the sums, once for the gradient) and reaches less of the tensor
cores. A chunk's logits exist once, in the activations' dtype; their gradient takes their place.
"""

import torch

from mamba_fsdp.conventions import IGNORED_LABEL
from mamba_fsdp.ops import triton
from mamba_fsdp.ops.loss import reference

why_not = triton.why_not
BLOCKS = {(8, 0): {"BLOCK": 4096, "num_warps": 8}}  # logits of one token at a time


def _chunk_loss(logits, labels, token_weights, want_gradient):
    labels, token_weights = (
        value if value is None else value.contiguous() for value in (labels, token_weights)
    )
    losses = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
    if not logits.is_meta:
        from mamba_fsdp.ops.loss.triton_kernels import cross_entropy

        cross_entropy[(len(losses),)](
            logits,
            labels,
            token_weights,
            losses,
            logits.shape[1],
            IGNORED=IGNORED_LABEL,
            GRADIENT=want_gradient,
            **triton.blocks(BLOCKS, logits.device),
        )
    return losses.sum(), logits


def _run(hidden, weight, labels, token_weights, want_gradient, chunk):
    """chunk 0: as many tokens as take the memory of the reference backend's, whose logits are float32 twice."""
    chunk = chunk or 8 * reference.CHUNK // hidden.element_size()
    return reference.in_chunks(
        _chunk_loss, hidden, weight, labels, token_weights, want_gradient, chunk
    )


loss_and_gradients = triton.operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels, Tensor? token_weights, bool want_gradient, "
    "int chunk) -> (Tensor, Tensor, Tensor)",
    _run,
    _run,
)
