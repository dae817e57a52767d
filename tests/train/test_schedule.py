"""The learning rate's factor over the run."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.fields import Duration
from config.train_config import TrainConfig
from mamba_fsdp.data.loader import Split
from mamba_fsdp.train.schedule import Schedule
from mamba_fsdp.train.setup import plan_steps
from mamba_fsdp.train.state import TrainState

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


def factors_of(settings, batches):
    """{(tokens before, tokens after): factor} of each step of a run that resumes a third of the way with each batch."""
    state, factors = TrainState(), {}
    for part, batch in enumerate(batches, 1):
        plan = plan_steps(settings, Split(0, 1, batch), state, 0, lambda text: None)
        while state.tokens < settings.training.num_steps.count * part / len(batches):
            before, factor = state.tokens, plan.learning_rate_factor(state)
            state.advance(batch, plan.tokens_per_step, 1.0, applied=True, excused=False)
            factors[before, state.tokens] = factor
    assert state.step == plan.total_steps
    return factors


@given(st.sampled_from(KINDS), st.integers(10, 300), st.sampled_from([Duration(-1, "steps"), Duration(7, "steps"),
                                                                      Duration(999, "tok")]))
def test_where_the_length_is_in_tokens_another_batch_does_not_bend_it(kind, length, duration):
    """Twice the batch, then half of the first: at equal tokens the factor is that of the unbroken run, to the end."""
    settings = TrainConfig()
    settings.data.seq_length, settings.training.num_steps = 16, Duration(length * 3 * 64, "tok")
    settings.lr_schedule.schedule = kind
    settings.lr_schedule.warmup_steps = Duration(0, "steps") if kind == "annealing" else duration
    settings.lr_schedule.decay_steps = duration
    whole, resumed = factors_of(settings, [2] * 3), factors_of(settings, [2, 4, 1])
    place = 0 if kind == "annealing" else 1  # it counts from 0, the others from 1
    expected = {step[place]: factor for step, factor in whole.items()}
    shared = {step[place]: factor for step, factor in resumed.items() if step[place] in expected}
    assert shared == {tokens: expected[tokens] for tokens in shared} and len(shared) > 2 * length
    end = {"constant": 1.0, "annealing": 1 / (length * 12)}.get(kind, 0.1)
    assert list(resumed.values())[-1] == pytest.approx(end)
