"""The SSD against the plain recurrence in float64, forward and gradients, and at the edges."""

import pytest
import torch

from mamba_fsdp.ops.ssd import reference, ssd, weighted_ssd
from mamba_fsdp.ops.ssd.entering import decays_from_start, output_of_state
from tests.support.compare import assert_like, double, evaluate, relative_error
from tests.support.definitions import random_documents, recurrence, ssd_values
from tests.support.memory import LargestTensor

pytestmark = pytest.mark.torch22


def inputs(
    batch=2, length=70, heads=4, headdim=3, groups=2, d_state=5, dtype=torch.float64, seed=0
):
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    values = ssd_values(randn, batch, length, heads, headdim, groups, d_state)
    return {name: value.to(dtype).requires_grad_() for name, value in values.items()}


@pytest.mark.parametrize("length, groups", [(1, 2), (63, 1), (64, 2), (65, 4), (150, 2)])
@pytest.mark.parametrize("bounded", [False, True])
def test_equals_the_recurrence(length, groups, bounded):
    """Outputs, last state and every gradient are the recurrence's, at any length, number of groups and boundaries."""
    values = inputs(length=length, groups=groups)
    values["initial_state"] = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    seq_idx = random_documents(2, length) if bounded else None
    found = evaluate(ssd, values, chunk_size=256, seq_idx=seq_idx, return_last_state=True)
    assert_like(found, evaluate(recurrence, values, seq_idx=seq_idx), 1e-11)


def test_decay_and_weight_by_themselves():
    """As Mamba-3 has them: those of the recurrence, x times the quotient of both."""
    x, _, _, B, C, *_ = inputs().values()
    generator = torch.Generator().manual_seed(1)
    decay, weight = torch.rand(2, *x.shape[:3], generator=generator, dtype=torch.float64)

    def definition(x, decay, weight, B, C):
        zeros = torch.zeros(4, dtype=torch.float64)
        dt = torch.log(torch.expm1(decay))
        return recurrence(x * (weight / decay)[..., None], dt, zeros - 1, B, C, zeros, zeros)[0]

    values = dict(x=x, decay=decay, weight=weight, B=B, C=C)
    found = evaluate(weighted_ssd, values, chunk_size=64)
    assert_like(found, evaluate(definition, values), 1e-11)


def test_a_part_from_zeros_and_the_output_of_the_state_before_it_are_the_whole():
    values = inputs()
    whole = ssd(**values, chunk_size=64)
    of_parts = [
        {name: value[:, span] if value.dim() > 1 else value for name, value in values.items()}
        for span in (slice(0, 30), slice(30, 70))
    ]
    first, state = ssd(**of_parts[0], chunk_size=64, return_last_state=True)
    second = of_parts[1]
    decays = decays_from_start(second["dt"], second["A"], second["dt_bias"])
    entering = output_of_state(second["C"], state, decays)
    parts = [first, ssd(**second, chunk_size=64) + entering]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-11, atol=1e-11)


def test_the_sums_of_a_deterministic_run_on_a_gpu(monkeypatch):
    """Without torch's cumsum, which a GPU refuses then, it is the same recurrence."""
    monkeypatch.setattr(reference, "_cumsum_repeats", lambda values: False)
    test_equals_the_recurrence(150, 2, False)


@pytest.mark.parametrize("bias", [-60.0, 0.0, 5.0, 300.0, 20000.0])
def test_extreme_dt(bias):
    """From no step at all to steps that forget everything: right in float32, and every gradient finite and right."""
    exact = inputs(length=100)
    with torch.no_grad():
        exact["dt_bias"] += bias
        exact["A"] *= 4
    single = {name: v.float() for name, v in exact.items()}
    found = evaluate(ssd, single, chunk_size=64)
    expected = evaluate(lambda **given: recurrence(**given)[0], double(single))
    assert relative_error(found["output 0"], expected["output 0"]) <= 1e-5
    assert_like(found, expected, 1e-4)


def test_memory_is_linear_in_the_length():
    """Kept for the backward pass: the inputs. Made on the way: nothing larger than a chunk of them squared."""
    heads = 4
    headdim = 64
    d_state = 32
    length = 1024
    values = inputs(1, length, heads, headdim, 1, d_state, dtype=torch.float32)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = ssd(**values, chunk_size=256)
        y.sum().backward()
    given = sum(v.untyped_storage().nbytes() for v in values.values())
    assert sum(kept.values()) <= 1.1 * given
    assert largest.bytes <= 8 * length * heads * 64  # sums of decays are float64
