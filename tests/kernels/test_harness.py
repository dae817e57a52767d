"""The harness itself: a kernel runs in the interpreter, and an error in it is noticed."""

import pytest
import torch
from compare import MOST, assert_like_reference
from toy import scaled_sum


class ScaledSum(torch.autograd.Function):
    @staticmethod
    def forward(context, x, y, scale):
        context.rows = len(x)
        context.scale = scale
        out = torch.empty_like(y)
        scaled_sum[(2,)](x, y, out, scale, y.numel(), len(x), BLOCK=16, MASKED=True)
        return out

    @staticmethod
    def backward(context, gradient):
        return (context.scale * gradient).expand(context.rows, -1), gradient, None


def leaves(dtype):
    return dict(x=torch.randn(5, 19).to(dtype), y=torch.randn(19).to(dtype))


@pytest.mark.parametrize("dtype", MOST)
def test_a_kernel_beside_float64(dtype):
    torch.manual_seed(0)
    got = assert_like_reference(
        lambda x, y: ScaledSum.apply(x, y, 0.5), lambda x, y: 0.5 * x.sum(0) + y, leaves(dtype)
    )
    assert got["output 0"].dtype == dtype


@pytest.mark.parametrize("scale", [0.501, float("nan")])
def test_an_error_is_noticed(scale):
    with pytest.raises(AssertionError, match="relative errors.*output 0"):
        assert_like_reference(
            lambda x, y: ScaledSum.apply(x, y, scale),
            lambda x, y: 0.5 * x.sum(0) + y,
            leaves(torch.float32),
        )
