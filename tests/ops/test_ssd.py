"""The SSD against the plain recurrence in float64, forward and gradients, and at the edges."""

import pytest
import torch

from mamba_fsdp.ops.ssd import reference, ssd
from tests.support.definitions import random_documents, recurrence, ssd_values
from tests.support.memory import LargestTensor

pytestmark = pytest.mark.torch22

NAMES = ("x", "dt", "A", "B", "C", "D", "dt_bias")


def inputs(
    batch=2, length=70, heads=4, headdim=3, groups=2, d_state=5, dtype=torch.float64, seed=0
):
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    values = ssd_values(randn, batch, length, heads, headdim, groups, d_state)
    return {name: value.to(dtype).requires_grad_() for name, value in values.items()}


def gradients(outputs, wanted, seed=2):
    generator = torch.Generator().manual_seed(seed)
    loss = sum(
        (o.double() * torch.randn(o.shape, generator=generator, dtype=torch.float64)).sum()
        for o in outputs
    )
    return torch.autograd.grad(loss, wanted)


def assert_close(actual, expected, tolerance, name=""):
    """Within `tolerance` of the largest magnitude of `expected`."""
    error = (actual.double() - expected.double()).abs().max().item()
    scale = expected.abs().max().item()
    assert error <= tolerance * max(scale, 1e-30), (
        f"{name}: error {error:.2e} at magnitude {scale:.2e}"
    )


@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("bounded", [False, True])
def test_equals_the_recurrence(length, groups, bounded):
    """Outputs, last state and every gradient are the recurrence's, at any length, number of groups and boundaries."""
    values = inputs(length=length, groups=groups)
    state = torch.randn(2, 4, 3, 5, dtype=torch.float64, requires_grad=True)
    seq_idx = random_documents(2, length) if bounded else None
    expected = recurrence(*values.values(), seq_idx, state)
    actual = ssd(
        **values, chunk_size=256, seq_idx=seq_idx, initial_state=state, return_last_state=True
    )
    wanted = [*values.values(), state]
    names = ("y", "last state", *NAMES, "initial state")
    for name, a, e in zip(
        names, (*actual, *gradients(actual, wanted)), (*expected, *gradients(expected, wanted))
    ):
        assert_close(a, e, 1e-11, name)


def test_the_sums_of_a_deterministic_run_on_a_gpu(monkeypatch):
    """Without torch's cumsum, which a GPU refuses then, it is the same recurrence."""
    monkeypatch.setattr(reference, "_cumsum_repeats", lambda values: False)
    test_equals_the_recurrence(150, 2, False)


@pytest.mark.parametrize("boundary", [1, 40, 64, 100])
def test_no_leak_between_documents(boundary):
    """Whatever one document holds, the other's outputs and gradients stay bitwise the same, both ways."""

    def run(changed):
        values = inputs(length=150, dtype=torch.float32)
        with torch.no_grad():
            for name in ("x", "dt", "B", "C"):
                values[name][:, changed] = 7 * values[name][:, changed].flip(1) + 3
        y = ssd(**values, chunk_size=64, seq_idx=seq_idx)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
        weights[:, changed] *= -5
        return y, torch.autograd.grad(
            (y * weights).sum(), [values[name] for name in ("x", "dt", "B", "C")]
        )

    seq_idx = (torch.arange(150) >= boundary).int().expand(2, 150)
    first = slice(0, boundary)
    second = slice(boundary, 150)
    nothing = slice(0, 0)
    y, grads = run(nothing)
    for changed, kept in ((first, second), (second, first)):
        other_y, other_grads = run(changed)
        assert not torch.equal(y[:, changed], other_y[:, changed])
        for a, b in zip((y, *grads), (other_y, *other_grads)):
            assert torch.equal(a[:, kept], b[:, kept])


@pytest.mark.parametrize("bias", [-60.0, 0.0, 5.0, 300.0, 20000.0])
def test_extreme_dt(bias):
    """From no step at all to steps that forget everything: right in float32, and every gradient finite and right."""
    exact = inputs(length=100)
    with torch.no_grad():
        exact["dt_bias"] += bias
        exact["A"] *= 4
    single = {name: v.detach().float().requires_grad_() for name, v in exact.items()}
    exact = {name: v.detach().double().requires_grad_() for name, v in single.items()}
    expected = recurrence(*exact.values())[0]
    actual = ssd(**single, chunk_size=64)
    assert_close(actual, expected, 1e-5, "y")
    got = gradients([actual], list(single.values()))
    want = gradients([expected], list(exact.values()))
    for name, a, e in zip(NAMES, got, want):
        assert torch.isfinite(a).all(), name
        assert_close(a, e, 1e-4, name)


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
