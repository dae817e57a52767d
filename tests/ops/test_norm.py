"""Tests mamba_fsdp.ops.norm against the definition of RMSNorm: plain, after a residual sum, and gated."""

import pytest
import torch
import torch.nn.functional as F

from mamba_fsdp.ops.norm import add_rms_norm, gated_rms_norm
from tests.support.compare import assert_like, double, evaluate


def leaves(*names):
    """Returns {name: random tensor}. "weight" has the shape (8,), every other name (2, 3, 8)."""
    generator = torch.Generator().manual_seed(0)
    values = {}
    for name in names:
        shape = (8,) if name == "weight" else (2, 3, 8)
        values[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values


def definition(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def after_a_sum(x, weight, eps, residual=0):
    return definition(x + residual, weight, eps), x + residual


@pytest.mark.parametrize("eps", [1e-5, 1.0])
@pytest.mark.parametrize("names", [("x", "weight"), ("x", "residual", "weight")])
def test_equals_its_definition(eps, names):
    values = leaves(*names)

    def norm(x, weight, residual=None):
        return add_rms_norm(x, residual, weight, eps, torch.float64)

    assert_like(evaluate(norm, values), evaluate(after_a_sum, values, eps=eps), 1e-12)


def test_residual_stays_float32():
    """The residual stream and its gradient are float32 for inputs of any dtype. The normed output has the requested
    dtype."""
    values = {name: value.float() for name, value in leaves("x", "residual", "weight").items()}
    values["x"] = values["x"].bfloat16()
    found = evaluate(add_rms_norm, values, eps=1e-5, out_dtype=torch.bfloat16)
    dtypes = [tensor.dtype for tensor in found.values()]
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.float32]
    expected = evaluate(after_a_sum, double(values), eps=1e-5)
    assert_like(found, expected, {name: 2.0**-8 for name in found} | {"output 1": 1e-7})


@pytest.mark.parametrize("group_size", [2, 4, 8])
@pytest.mark.parametrize("norm_first", [False, True])
def test_gated_norms_each_group_after_the_gate_or_before_it(group_size, norm_first):
    def gated(x, z, weight):
        gate = F.silu(z)
        groups = (x if norm_first else x * gate).unflatten(-1, (-1, group_size))
        normed = definition(groups, weight.view(-1, group_size), 1e-5).flatten(-2)
        return normed * gate if norm_first else normed

    values = leaves("x", "z", "weight")
    how = dict(eps=1e-5, group_size=group_size, norm_first=norm_first)
    assert_like(evaluate(gated_rms_norm, values, **how), evaluate(gated, values), 1e-12)
