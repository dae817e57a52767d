"""Mamba-1's scan, both CPU backends, against a plain loop in float64: forward, gradients, and at the edges."""

import functools

import pytest
import torch
import torch.nn.functional as F

from mamba_fsdp.ops.scan import selective_scan
from tests.support.compare import assert_like, double, equal, evaluate
from tests.support.definitions import loop, random_documents
from tests.support.memory import LargestTensor

NAMES = ("u", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")


def inputs(batch=2, length=70, d_inner=5, d_state=3, dt_shift=-2.0, dt_scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    values = (
        randn(batch, length, d_inner),
        randn(batch, length, d_inner) * dt_scale + dt_shift,
        -torch.exp(randn(d_inner, d_state)),
        randn(batch, length, d_state),
        randn(batch, length, d_state),
        randn(d_inner),
        randn(batch, length, d_inner),
        randn(d_inner),
        randn(batch, d_inner, d_state),
    )
    return dict(zip(NAMES, values))


def typed(values, dtype):
    """Leaves of `dtype`; parameters and states keep at least float32, as under mixed precision."""
    kept = ("A", "D", "dt_bias", "initial_state")
    return {
        name: v.to(
            torch.promote_types(dtype, torch.float32) if name in kept else dtype
        ).requires_grad_()
        for name, v in values.items()
    }


def of_the_loop(values, seq_idx, dtype):
    """Expected results of a backend that is given `values` in `dtype`."""
    return evaluate(loop, double(typed(values, dtype)), seq_idx=seq_idx)


def check(backend, values, seq_idx=None, dtype=torch.float64, tolerance=1e-12, expected=None):
    expected = expected or of_the_loop(values, seq_idx, dtype)
    how = dict(seq_idx=seq_idx, return_last_state=True, backend=backend)
    assert_like(evaluate(selective_scan, typed(values, dtype), **how), expected, tolerance)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 100])
@pytest.mark.parametrize("bounded", [False, True])
def test_equals_the_loop_at_every_chunk_edge(backend, length, bounded):
    check(
        backend,
        inputs(length=length),
        random_documents(2, length) if bounded else None,
        tolerance=1e-9,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 3e-6)])
@pytest.mark.parametrize(
    "dt_shift, dt_scale, A_scale",
    [(-40, 5, 1), (0, 0.01, 1e-4), (3, 30, 1), (1000, 300, 8)],
    ids=str,
)
def test_long_sequences_and_extreme_dt(backend, dtype, tolerance, dt_shift, dt_scale, A_scale):
    """700 positions; delta from 1e-25 up, and |delta A| up to over 1e4 a step."""
    values, expected = extreme(dtype, dt_shift, dt_scale, A_scale)
    if dt_shift == 1000:
        assert (F.softplus(values["dt"])[..., None] * values["A"]).abs().max() > 1e4
    check(backend, values, random_documents(2, 700), dtype, tolerance, expected)


@functools.cache
def extreme(dtype, dt_shift, dt_scale, A_scale):
    """(inputs, what the loop gives): the same for every backend, and most of the time."""
    values = inputs(length=700, dt_shift=dt_shift, dt_scale=dt_scale)
    values["A"] = values["A"] * A_scale
    return values, of_the_loop(values, random_documents(2, 700), dtype)


@pytest.mark.parametrize("length", [50, 1000])
def test_bf16_is_as_exact_as_its_storage(backend, length):
    """Inner arithmetic is float32, so bf16 costs no more than the rounding of y and its gradient: 2^-9 each, some more
    in sums over positions."""
    check(
        backend,
        inputs(length=length, d_inner=20),
        random_documents(2, length),
        torch.bfloat16,
        2**-7,
    )


def test_nan_is_not_hidden(backend):
    """A NaN anywhere reaches the outputs behind it, so that the step's check can see it."""
    for name in ("u", "dt", "B", "C", "z", "A"):
        values = inputs(length=40)
        values[name].view(-1)[0] = float("nan")
        assert selective_scan(**typed(values, torch.float32), backend=backend).isnan().any(), name


def test_results_do_not_depend_on_threads(backend):
    if backend == "reference":
        pytest.skip("PyTorch's matrix multiplications decide for themselves")
    values = typed(inputs(batch=3, length=50, d_inner=300), torch.float32)
    threads = torch.get_num_threads()
    seen = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            seen.append(evaluate(selective_scan, values, return_last_state=True, backend=backend))
    finally:
        torch.set_num_threads(threads)
    assert equal(*seen)


def test_memory_is_linear_without_d_state(backend):
    """No tensor of batch x length x d_inner x d_state ever exists, nor anything near it, in either pass."""
    values = typed(inputs(batch=2, length=1024, d_inner=32, d_state=32), torch.float32)
    with LargestTensor() as largest:
        selective_scan(**values, backend=backend).sum().backward()
    assert largest.bytes <= 4 * 2 * 1024 * 32 * 32 / 8
