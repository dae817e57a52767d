"""The learning rate's factor over the run."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_fsdp.train.schedule import Schedule

KINDS = ["cosine", "wsd", "linear", "constant", "annealing"]


@given(st.sampled_from(KINDS), st.integers(1, 3000), st.integers(-1, 400), st.integers(-1, 400), st.floats(0, 1))
def test_a_factor_is_a_share_and_no_step_divides_by_zero(kind, total, warmup, decay, floor):
    schedule = Schedule(kind, total, warmup=warmup, decay=decay, floor=floor)
    assert all(0 <= schedule.factor(step) <= 1 for step in range(total))
    assert schedule.factor(0) > 0 or floor == 0


def test_cosine_is_that_of_fms_fsdp():
    """min(1 - (1 - x/W)^2, 0.1 + 0.45 (1 + cos(pi x/N))), W = min(2000, N/20)."""
    total = 1000
    schedule = Schedule("cosine", total)
    for step in range(total):
        x, warmup = step + 1, min(2000, total // 20)
        expected = min(1 - (1 - min(x, warmup) / warmup) ** 2, 0.1 + 0.45 * (1 + math.cos(math.pi * x / total)))
        assert schedule.factor(step) == pytest.approx(expected, abs=1e-12)


def test_wsd_is_that_of_composer():
    """Linear warm-up, 1 until t_max - t_decay, then (t_max - t)/t_decay, never below the floor."""
    schedule = Schedule("wsd", 1000, warmup=100, decay=200, floor=0.1)
    assert schedule.factor(49) == pytest.approx(0.5)
    assert {schedule.factor(step) for step in range(99, 799)} == {1.0}
    assert schedule.factor(899) == pytest.approx(0.5)
    assert schedule.factor(999) == 0.1


def test_annealing_goes_straight_to_zero_and_constant_stays():
    annealing = Schedule("annealing", 10)
    assert [annealing.factor(step) for step in range(10)] == pytest.approx([1 - step / 10 for step in range(10)])
    assert {Schedule("constant", 10).factor(step) for step in range(10)} == {1.0}
    assert Schedule("linear", 10, warmup=0, floor=0.1).factor(9) == pytest.approx(0.1)
