"""Computes the A of Mamba and of Gated DeltaNet from its parameter, A_log."""

from typing import Any

from torch import Tensor
from torch.autograd import Function


class NegativeExp(Function):
    """Computes -exp(x). The derivative is equal to the result, so that the backward pass is one product: one kernel launch
    less than with exp and neg."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp().neg_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]
