"""RMSNorm, plain, behind a residual sum, and gated, against its definition."""

import pytest
import torch
import torch.nn.functional as F

from mamba_fsdp.ops.norm import add_rms_norm, gated_rms_norm
from mamba_fsdp.ops.norm.reference import rms_norm
from tests.support.compare import assert_like, evaluate


def randn(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def definition(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def behind_a_sum(x, residual, weight, eps):
    return definition(x + residual, weight, eps), x + residual


@pytest.mark.parametrize("eps", [1e-5, 1.0])
def test_equals_its_definition(eps):
    leaves = {"x": randn(2, 3, 7), "weight": randn(7, seed=1)}
    found = evaluate(rms_norm, leaves, eps=eps, out_dtype=torch.float64)
    assert_like(found, evaluate(definition, leaves, eps=eps), 1e-12)
    leaves["residual"] = randn(2, 3, 7, seed=2)
    found = evaluate(add_rms_norm, leaves, eps=eps, out_dtype=torch.float64)
    assert_like(found, evaluate(behind_a_sum, leaves, eps=eps), 1e-12)


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
    assert x.grad.dtype == torch.bfloat16
    assert residual.grad.dtype == weight.grad.dtype == torch.float32


@pytest.mark.parametrize("group_size", [2, 4, 8])
@pytest.mark.parametrize("norm_first", [False, True])
def test_gated_norms_each_group_behind_the_gate_or_before_it(group_size, norm_first):
    def gated(x, z, weight):
        gate = F.silu(z)
        groups = (x if norm_first else x * gate).unflatten(-1, (-1, group_size))
        normed = definition(groups, weight.view(-1, group_size), 1e-5).flatten(-2)
        return normed * gate if norm_first else normed

    leaves = {"x": randn(2, 3, 8), "z": randn(2, 3, 8, seed=1), "weight": randn(8, seed=2)}
    how = dict(eps=1e-5, group_size=group_size, norm_first=norm_first)
    found = evaluate(gated_rms_norm, leaves, **how)
    assert_like(found, evaluate(gated, leaves), 1e-12)
