"""Tests mamba_fsdp.trainer.schedule: the factor of the learning rate at each step, the length of a run, and the
interval of validations."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import optimization, trainer_utils

from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import Duration
from mamba_fsdp.settings.resolve import resolve_settings
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer.schedule import Schedule, schedule_run


def fms_cosine(x):
    """Returns the factor of fms-fsdp at step x for a run of N = 1000 steps.

    The formula is min(1 - (1 - x/W)^2, 0.1 + 0.45 (1 + cos(pi x/N))) with W = min(2000, N/20).
    """
    return min(1 - (1 - min(x, 50) / 50) ** 2, 0.1 + 0.45 * (1 + math.cos(math.pi * x / 1000)))


def wsd_of_composer(x):
    """Returns the factor of Composer's WSD schedule at step x: a linear warm-up, then 1 until t_max - t_decay, then
    (t_max - t)/t_decay, but not below the floor."""
    return min(x / 100, 1, max(0.1, (1000 - x) / 200))


FORMULAS = [
    (Schedule("fms_cosine", 1000), fms_cosine),
    (Schedule("wsd", 1000, warmup=100, decay=200, floor=0.1), wsd_of_composer),
    (Schedule("wsd", 5, warmup=0), lambda x: 1.0 if x < 5 else 0.1),
    (Schedule("annealing", 10), lambda x: 1 - (x - 1) / 10),
    (Schedule("constant", 10), lambda x: 1.0),
]


@pytest.mark.parametrize("schedule, formula", FORMULAS)
def test_a_schedule_is_its_formula(schedule, formula):
    """The factor of the x-th step, counted from 1, equals its formula."""
    for x in range(1, schedule.total + 1):
        assert schedule.factor(x - 1) == pytest.approx(formula(x), abs=1e-12), x


END = {"num_training_steps": 200}
FLOOR = {"min_lr_rate": 0.1}
# (function of transformers, its arguments, our schedule, warm-up steps, arguments of our schedule)
THEIRS = [
    ("constant_schedule_with_warmup", {}, "constant", 30, {}),
    ("linear_schedule_with_warmup", END, "linear", 30, {}),
    ("cosine_with_min_lr_schedule_with_warmup", END | FLOOR, "cosine", 30, {"floor": 0.1}),
    (
        "cosine_with_hard_restarts_schedule_with_warmup",
        END | {"num_cycles": 3},
        "cosine_with_restarts",
        30,
        {"cycles": 3},
    ),
    (
        "polynomial_decay_schedule_with_warmup",
        END | {"power": 2.0, "lr_end": 0.1},
        "polynomial",
        30,
        {"power": 2.0, "floor": 0.1},
    ),
    ("inverse_sqrt_schedule", {}, "inverse_sqrt", 30, {}),
    ("wsd_schedule", END | {"num_decay_steps": 50}, "wsd_cosine", 30, {"decay": 50}),
    (
        "wsd_schedule",
        END | {"num_decay_steps": 50, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
        "wsd_sqrt",
        0,
        {"decay": 50, "floor": 0.1},
    ),
    (
        "wsd_schedule",
        END | {"num_decay_steps": 50, "decay_type": "linear"},
        "wsd",
        30,
        {"decay": 50},
    ),
]


@pytest.mark.parametrize("function, arguments, kind, warmup, ours", THEIRS)
def test_a_schedule_equals_the_one_of_transformers(function, arguments, kind, warmup, ours):
    """The factors of a schedule equal those of transformers at every step, also after the end. Our first step has the
    factor of position 1, where transformers uses position 0."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    make = getattr(optimization, f"get_{function}")
    (theirs,) = make(optimizer, num_warmup_steps=warmup, **arguments).lr_lambdas
    schedule = Schedule(kind, 200, warmup=warmup, **{"floor": 0.0, **ours})
    # After the end, some cosines of transformers rise again.
    steps = 199 if kind.startswith("cosine") else 210
    for step in range(steps):
        expected = theirs(step + 1)
        assert schedule.factor(step) == pytest.approx(expected, rel=1e-12, abs=1e-15), step
    assert schedule.factor(10**6) <= max(schedule.factor(199), 1e-15) or kind == "constant"


def test_every_scheduler_type_of_the_trainer_is_accepted_or_refused_by_name():
    """Every scheduler type of transformers' Trainer is accepted with the defaults of transformers, which are no
    warm-up and a decay to 0, or refused because it depends on the validation loss."""
    refused = set()
    for kind in trainer_utils.SchedulerType:
        try:
            settings = resolve_settings({"lr_scheduler_type": kind.value})
        except UserError as error:
            assert (
                f"lr_scheduler_type={kind.value}: this schedule depends on the validation loss"
                in str(error)
            )
            refused.add(kind.value)
            continue
        assert settings.lr_schedule.warmup_steps.count == 0 and "schedule" in settings.explicit
        if "min_learning_rate_ratio" in settings.explicit:
            assert settings.lr_schedule.min_learning_rate_ratio == 0
        words = {"lr_scheduler_type": kind.value, "warmup_ratio": "0.1"}
        assert resolve_settings(words).lr_schedule.warmup_ratio == 0.1
    assert refused == {"reduce_lr_on_plateau", "greedy"}


def resumed(state, num_steps, until=None, **more):
    """Trains from `state` to the end of the run or to the step `until`. Returns (learning rates, printed lines)."""
    settings = TrainConfig()
    settings = settings.with_values(
        seq_length=16, learning_rate=1.0, num_steps=Duration.parse(str(num_steps)), **more
    )
    lines, rates = [], []
    run = schedule_run(settings, 2, state, settings.training.num_steps, 0, lines.append)
    while state.step < (until or run.total_steps):
        rates.append(run.lr.next_factor(state, run.tokens_per_step))
        state.advance(2, run.tokens_per_step, 1.0, applied=True, excused=False)
    return rates, " ".join(lines)


def cosine(total, steps):
    return [Schedule("cosine", total).factor(step) for step in steps]


@pytest.mark.parametrize("follows", [False, True])
def test_a_longer_run_keeps_the_last_learning_rate_unless_schedule_steps_is_given(follows):
    shorter = "3200tok"
    longer = "6400tok"
    state = TrainState()
    first, printed = resumed(state, shorter)
    assert not printed and first == cosine(100, range(100))
    given = {"schedule_steps": Duration.parse(longer)} if follows else {}
    broken = replace(state)
    rates, printed = resumed(state, longer, **given)
    assert f"its length was {shorter} and is now {longer}: the learning rate " in printed
    expected_text = "goes from 1.00e-01 to 5.8" if follows else f"; schedule_steps={longer} would"
    assert expected_text in printed
    expected = cosine(200, range(100, 200)) if follows else [0.1] * 100
    assert rates == pytest.approx(expected)
    before, _ = resumed(broken, longer, until=150, **given)
    after, printed_later = resumed(broken, longer, **given)
    assert before + after == rates and not printed_later


def test_other_changes_of_the_length():
    """A schedule that has not started to decay, and a shorter run, follow the new length. If the schedule has already
    ended at a learning rate of 0, a longer run is an error unless schedule_steps is given."""
    state = TrainState()
    wsd = [Schedule("wsd", 200).factor(step) for step in range(200)]
    first = [Schedule("wsd", 100).factor(step) for step in range(50)]
    assert resumed(state, 100, schedule="wsd", until=50) == (first, "")
    assert resumed(state, 200, schedule="wsd") == (wsd[50:], "")
    state = TrainState()
    resumed(state, 200, until=50)
    _, printed = resumed(state, 100, until=60)
    assert "was 200 and is now 100: the learning rate goes from 9.00e-01" in printed
    assert set(resumed(state, 150, until=120)[0][40:]) == {0.1}
    state = TrainState()
    resumed(state, 10, schedule="annealing")
    with pytest.raises(
        UserError, match="num_steps=20: the schedule ends at 10, .* schedule_steps=20"
    ):
        resumed(state, 20, schedule="annealing")
    rates, _ = resumed(state, 20, schedule="annealing", schedule_steps=Duration.parse("20"))
    assert rates == [Schedule("annealing", 20).factor(step) for step in range(10, 20)]


def test_a_changed_global_batch_is_reported_once_and_a_length_in_tokens_is_kept():
    printed = []
    state = TrainState()
    length = Duration(8192, "tok")
    for samples, steps in ((4, 8), (2, 1 + 14), (2, 1 + 14)):
        schedule = schedule_run(TrainConfig(), samples, state, length, 0, printed.append)
        assert schedule.total_steps == steps
        state.advance(samples, 256 * samples, 1.0, applied=True, excused=False)
    (line,) = printed
    assert line.startswith("batch      2 samples per step from here on, 4 before; ")


@pytest.mark.parametrize("stores, batches", [(0, 0), (1, 15), (2, 8)])
def test_validations_take_a_twentieth_of_the_time_of_steps(stores, batches):
    """The default number of batches makes a validation take a twentieth of the time of the steps between two
    validations. There are 100 steps here, and each takes as long as three forward passes."""
    settings = TrainConfig().with_values(eval_interval=Duration(100, "steps"))
    length = Duration(9, "steps")
    schedule = schedule_run(settings, 2, TrainState(), length, stores, pytest.fail)
    assert (schedule.eval_steps, schedule.eval_batches) == (100 * (stores > 0), batches)
