"""The learning rate's factor over the run."""

import json
import math
from dataclasses import asdict, replace

import pytest

from config.fields import Duration
from config.train_config import TrainConfig
from mamba_fsdp.data.loader import BatchLayout
from mamba_fsdp.errors import UserError
from mamba_fsdp.train.run_schedule import schedule_run
from mamba_fsdp.train.schedule import Schedule
from mamba_fsdp.train.state import TrainState


def test_cosine_is_that_of_fms_fsdp():
    """min(1 - (1 - x/W)^2, 0.1 + 0.45 (1 + cos(pi x/N))), W = min(2000, N/20)."""
    total = 1000
    schedule = Schedule("cosine", total)
    for step in range(total):
        x, warmup = step + 1, min(2000, total // 20)
        expected = min(
            1 - (1 - min(x, warmup) / warmup) ** 2, 0.1 + 0.45 * (1 + math.cos(math.pi * x / total))
        )
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
    assert [annealing.factor(step) for step in range(10)] == pytest.approx(
        [1 - step / 10 for step in range(10)]
    )
    assert {Schedule("constant", 10).factor(step) for step in range(10)} == {1.0}
    assert Schedule("linear", 10, warmup=0, floor=0.1).factor(9) == pytest.approx(0.1)


def resumed(state, num_steps, until=None, **more):
    """The learning rates of a run on from `state`, to its end or `until`, and what is said."""
    settings = TrainConfig()
    settings.data.seq_length = 16
    settings.optimizer.learning_rate = 1.0
    settings.training.num_steps = Duration.parse(str(num_steps))
    for name, value in more.items():
        setattr(settings.lr_schedule, name, value)
    said, rates = [], []
    run = schedule_run(
        settings, BatchLayout(0, 1, 2), state, settings.training.num_steps, 0, said.append
    )
    while state.step < (until or run.total_steps):
        rates.append(run.lr.next_factor(state, run.tokens_per_step))
        state.advance(2, run.tokens_per_step, 1.0, applied=True, excused=False)
    return rates, " ".join(said)


def cosine(total, steps):
    return [Schedule("cosine", total).factor(step) for step in steps]


@pytest.mark.parametrize("unit", ["", "tok"])
@pytest.mark.parametrize("follows", [False, True])
def test_a_longer_run_holds_the_learning_rate_unless_schedule_steps_says_otherwise(unit, follows):
    def length(steps):
        return f"{steps * 32}tok" if unit else str(steps)

    state = TrainState()
    first, said = resumed(state, length(100))
    assert not said and first == cosine(100, range(100))
    given = {"schedule_steps": Duration.parse(length(200))} if follows else {}
    broken = replace(state)
    rates, said = resumed(state, length(200), **given)
    assert f"its length was {length(100)}, is {length(200)}: the learning rate " in said
    if follows:
        assert "goes from 1.00e-01 to 5.4" in said
        assert rates == pytest.approx(cosine(200, range(100, 200)))
    else:
        assert (
            f"at 1.00e-01 now, and stays where that ends; schedule_steps={length(200)} would"
            in said
        )
        assert rates == pytest.approx([0.1] * 100)
    before, _ = resumed(broken, length(200), until=150, **given)
    saved = TrainState(**json.loads(json.dumps(asdict(broken))))
    after, said_later = resumed(saved, length(200), **given)
    assert before + after == rates and not said_later


def test_what_becomes_of_other_changes_of_the_length():
    """A schedule that is not decaying yet follows the new length; a shorter run does; nothing is held at 0."""
    state = TrainState()
    wsd = [Schedule("wsd", 200).factor(step) for step in range(200)]
    assert resumed(state, 100, schedule="wsd", until=50) == (
        [Schedule("wsd", 100).factor(step) for step in range(50)],
        "",
    )
    assert resumed(state, 200, schedule="wsd") == (wsd[50:], "")
    state = TrainState()
    resumed(state, 200, until=50)
    assert "was 200, is 100: the learning rate goes from 8.6" in resumed(state, 100, until=60)[1]
    assert set(resumed(state, 150, until=120)[0][40:]) == {0.1}
    state = TrainState()
    resumed(state, 10, schedule="annealing")
    with pytest.raises(
        UserError, match="num_steps=20: the learning rate is 0 .* schedule_steps=20"
    ):
        resumed(state, 20, schedule="annealing")
    rates, _ = resumed(state, 20, schedule="annealing", schedule_steps=Duration.parse("20"))
    assert rates == [Schedule("annealing", 20).factor(step) for step in range(10, 20)]


def test_a_schedule_that_an_older_version_saved_is_read():
    held = {"num_steps": "200", "lengthened": "hold", "curve": {"total": 100, "in_tokens": False}}
    state = TrainState(step=150, tokens=150 * 32, samples=300, schedule=held)
    assert resumed(state, 200) == ([pytest.approx(0.1)] * 50, "")
    curve = {"total": 200, "in_tokens": False, "start": 100, "low": 0.1}
    warmed = {"num_steps": "200", "lengthened": "rewarm", "curve": curve}
    rates, said = resumed(TrainState(step=150, tokens=150 * 32, samples=300, schedule=warmed), 200)
    assert rates == cosine(200, range(150, 200)) and not said
