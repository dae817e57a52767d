"""The gated delta rule against the plain recurrence in float64, forward and gradients, at the edges, and the call of
flash-linear-attention's kernel."""

import sys
import types

import pytest
import torch

from mamba_fsdp.ops.gdn import gated_delta_rule
from tests.support.compare import assert_like, double, evaluate
from tests.support.definitions import delta_recurrence, random_documents

pytestmark = pytest.mark.torch22


def inputs(length=70, heads=4, groups=2, d_state=5, headdim=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    values = dict(
        q=randn(2, length, groups, d_state),
        k=randn(2, length, groups, d_state),
        v=randn(2, length, heads, headdim),
        g=-randn(2, length, heads).exp(),
        beta=2 * torch.sigmoid(randn(2, length, heads)),
        initial_state=randn(2, heads, d_state, headdim),
    )
    return {name: value.to(dtype) for name, value in values.items()}


@pytest.mark.parametrize("length, groups", [(1, 2), (3, 1), (63, 4), (64, 2), (65, 2), (150, 1)])
@pytest.mark.parametrize("bounded", [False, True])
def test_equals_the_recurrence(length, groups, bounded):
    """Outputs, last state and every gradient are the recurrence's, at any length, number of groups and boundaries."""
    values = inputs(length, groups=groups)
    seq_idx = random_documents(2, length) if bounded else None
    found = evaluate(gated_delta_rule, values, seq_idx=seq_idx, return_last_state=True)
    assert_like(found, evaluate(delta_recurrence, values, seq_idx=seq_idx), 1e-12)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0])
def test_extreme_decays_and_strengths(scale):
    """From states that stay to states that are forgotten at once, and with beta of 0 and of 2: right in float32, and
    every gradient finite."""
    values = inputs(100, dtype=torch.float32)
    values["g"] *= scale
    values["beta"][:, ::7] = 0
    values["beta"][:, 1::7] = 2
    found = evaluate(gated_delta_rule, values, return_last_state=True)
    expected = evaluate(delta_recurrence, double(values))
    # A beta of 0 is held above 0, so that its own gradient is 0.
    found["gradient of beta"][:, ::7] = expected["gradient of beta"][:, ::7] = 0
    assert_like(found, expected, 1e-4)


def test_bf16_is_computed_in_fp32():
    values = inputs(100, dtype=torch.float32)
    half = values | {name: values[name].bfloat16() for name in ("q", "k", "v")}
    found = evaluate(gated_delta_rule, half)
    assert found["output 0"].dtype == found["gradient of k"].dtype == torch.bfloat16
    expected = evaluate(lambda **given: delta_recurrence(**given)[0], double(half))
    assert_like(found, expected, dict.fromkeys(found, 2.0**-7))


@pytest.mark.parametrize("bounded", [False, True])
def test_the_call_of_flash_linear_attention(monkeypatch, bounded):
    """Documents come in one row with their bounds; a stand-in with its arguments answers."""

    def chunk_gated_delta_rule(
        q, k, v, g, beta, *, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    ):
        assert use_qk_l2norm_in_kernel and (cu_seqlens is None) != bounded
        seq_idx = None
        if bounded:
            assert len(q) == 1 and cu_seqlens[-1] == q.shape[1]
            seq_idx = torch.zeros(q.shape[:2], dtype=torch.int64)
            seq_idx[0, cu_seqlens[1:-1]] = 1
            seq_idx = seq_idx.cumsum(1)
        y, last = delta_recurrence(q, k, v, g, beta, seq_idx, initial_state)
        return y, last if output_final_state else None

    module = types.ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    values = inputs(70)
    rest = dict(return_last_state=True)
    if bounded:
        del values["initial_state"]
        rest = dict(seq_idx=random_documents(2, 70))
        with pytest.raises(AssertionError, match="each document has a state"):
            gated_delta_rule(**inputs(70), **rest, backend="fused")
    found, expected = (
        evaluate(gated_delta_rule, values, **rest, backend=backend)
        for backend in ("fused", "reference")
    )
    assert_like(found, expected, 1e-12)
