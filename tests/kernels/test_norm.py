"""Compares the Triton kernels of the norms with the reference backend in float64: odd sizes, groups, both orders of
norm and gate, slices, bf16."""

from functools import partial

import pytest
import torch

from mamba_fsdp.ops.norm import add_rms_norm, gated_rms_norm
from mamba_fsdp.ops.norm import triton as backend
from tests.support.compare import assert_like_reference, equal, evaluate


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Makes the blocks so small that several programs contribute to the gradient of a weight."""
    monkeypatch.setattr(backend, "ROWS", 4)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def add_norm(x, residual, weight, backend):
    return add_rms_norm(x, residual, weight, 1e-5, x.dtype, backend=backend)


def both(function, **options):
    return (partial(function, backend=name, **options) for name in ("triton", "reference"))


@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize(
    "shape", [(2, 5, 7), (1, 4, 64), (1, 2, 16384), (3, 1, 1), (0, 4, 6), (2, 0, 6)], ids=str
)
def test_norm_of_a_sum(shape, has_residual):
    residual = randn(*shape) if has_residual else None
    leaves = dict(x=randn(*shape), residual=residual, weight=randn(shape[-1]))
    assert_like_reference(*both(add_norm), leaves)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_gated_norm_by_groups(groups, norm_first):
    """The gated norm is right in both orders of norm and gate, for a gate that is a slice of a projection."""
    channels = 11 * groups
    z = randn(2, 5, channels + 5)[..., 3 : 3 + channels]
    leaves = dict(x=randn(2, 5, channels), z=z, weight=randn(channels))
    kernels, reference = both(gated_rms_norm, eps=1e-5, group_size=11, norm_first=norm_first)
    assert_like_reference(kernels, reference, leaves)


def test_bf16_with_a_weight_in_fp32():
    """With x in bf16, the residual stream and its gradient stay in fp32, and two runs give the same bits."""
    x = randn(1, 6, 9, dtype=torch.bfloat16)
    leaves = dict(x=x, residual=randn(1, 6, 9), weight=randn(9))
    kernels, reference = both(add_norm)
    got = assert_like_reference(kernels, reference, leaves)
    assert got["output 0"].dtype == got["gradient of x"].dtype == torch.bfloat16
    assert got["output 1"].dtype == got["gradient of residual"].dtype == torch.float32
    assert got["gradient of weight"].dtype == torch.float32
    assert equal(got, evaluate(kernels, leaves))


def test_gradients_if_only_one_output_is_used():
    """The gradients are right if only the norm or only the sum is used. The sum of a model's last norm is not used."""
    leaves = dict(x=randn(1, 6, 9), residual=randn(1, 6, 9), weight=randn(9))

    def normed(backend, **leaves):
        return add_norm(**leaves, backend=backend)[0]

    assert_like_reference(partial(normed, "triton"), partial(normed, "reference"), leaves)
    for leaf in leaves.values():
        leaf.requires_grad_()
    add_norm(**leaves, backend="triton")[1].sum().backward()
    assert (leaves["x"].grad == 1).all() and (leaves["residual"].grad == 1).all()
    assert not leaves["weight"].grad.any()
