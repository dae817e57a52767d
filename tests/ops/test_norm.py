"""RMSNorm, plain, behind a residual sum, and gated, against its definition."""

import pytest
import torch
import torch.nn.functional as F

from mamba_fsdp.ops.norm import add_rms_norm, gated_rms_norm
from mamba_fsdp.ops.norm.reference import rms_norm


def randn(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def definition(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("eps", [1e-5, 1.0])
def test_equals_its_definition(eps):
    x = randn(2, 3, 7)
    weight = randn(7, seed=1)
    torch.testing.assert_close(rms_norm(x, weight, eps, x.dtype), definition(x, weight, eps))


def test_gradcheck():
    x = randn(2, 3, 6)
    z = randn(2, 3, 6, seed=1)
    weight = randn(6, seed=2)
    assert torch.autograd.gradcheck(lambda *v: rms_norm(*v, 1e-5, torch.float64), (x, weight))
    assert torch.autograd.gradcheck(
        lambda *v: add_rms_norm(*v, 1e-5, torch.float64), (x, z, weight)
    )
    for group_size in (6, 3, 1):
        assert torch.autograd.gradcheck(
            lambda *v, group_size=group_size: gated_rms_norm(*v, 1e-5, group_size), (x, z, weight)
        )


def test_residual_stays_float32():
    """The stream is float32 whatever comes in, and the normed output has the dtype asked for; so do the gradients."""
    x = randn(2, 5, 8, dtype=torch.bfloat16)
    weight = randn(8, dtype=torch.float32)
    residual = randn(2, 5, 8, dtype=torch.float32, seed=1)
    for before in (None, residual):
        normed, after = add_rms_norm(x, before, weight, 1e-5, torch.bfloat16)
        assert normed.dtype == torch.bfloat16 and after.dtype == torch.float32
        total = x.float() if before is None else x.float() + before
        assert torch.equal(after, total)
        torch.testing.assert_close(
            normed.float(), definition(total, weight, 1e-5), rtol=2**-8, atol=1e-6
        )
        (normed.float().sum() + after.sum()).backward()
    assert (
        x.grad.dtype == torch.bfloat16
        and residual.grad.dtype == torch.float32
        and weight.grad.dtype == torch.float32
    )


@pytest.mark.parametrize("group_size", [2, 4, 8])
def test_gated_norms_each_group_behind_the_gate(group_size):
    x = randn(2, 3, 8)
    z = randn(2, 3, 8, seed=1)
    weight = randn(8, seed=2)
    groups = (x * F.silu(z)).unflatten(-1, (-1, group_size))
    expected = definition(groups, weight.view(-1, group_size), 1e-5).flatten(-2)
    torch.testing.assert_close(gated_rms_norm(x, z, weight, 1e-5, group_size), expected)
