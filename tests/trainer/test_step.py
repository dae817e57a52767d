"""Tests a step: batches are read, gradients are accumulated, weights are updated, and its numbers are read during
the next step."""

import itertools
import json
import math

import pytest
import torch

from mamba_fsdp.data.loader import Loader
from mamba_fsdp.errors import UserError
from mamba_fsdp.trainer import loop
from mamba_fsdp.trainer.step_stats import StepSums
from mamba_fsdp.trainer.stopping import StopRequest
from tests.support.checkpoints import metrics_of

pytestmark = pytest.mark.torch22
AT_ONCE, A_STEP_LATE = 0, 1


@pytest.fixture
def read_numbers(monkeypatch):
    """read_numbers(late): delays reading the numbers of a step by this many steps."""
    return lambda late: monkeypatch.setitem(loop.STEPS_AHEAD, "cpu", late)


@pytest.fixture
def lose(monkeypatch):
    """lose(factors): multiplies the loss of step n, counted from 1, by factors[n] in a run with one micro-batch per
    step."""
    true_loss = loop.batch_loss

    def change(factors):
        steps = itertools.count(1)

        def loss(module, batch):
            loss = true_loss(module, batch)
            if torch.is_grad_enabled():
                loss = loss * factors.get(next(steps), 1.0)
            return loss

        monkeypatch.setattr(loop, "batch_loss", loss)

    return change


@pytest.fixture
def stop_at_look(monkeypatch):
    """stop_at_look(n): asks the run to stop before the n-th check for a request.

    The first check is before the first step.
    """

    def stop(number):
        looks = itertools.count(1)
        monkeypatch.setattr(StopRequest, "check", lambda request: next(looks) >= number)

    return stop


def left_by(run):
    """Returns a run's metrics, and the progress and tensors in its checkpoints."""
    checkpoints = []
    for path in sorted(run.glob("checkpoints/step_*")):
        progress = json.loads((path / "state.json").read_text())["state"]["progress"]
        del progress["first_started"], progress["step_seconds"]
        checkpoints.append((progress, next(path.glob("rank_*")).read_bytes()))
    return metrics_of(run), checkpoints


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision, length, factors",
    [
        ("fp32", "8", {3: math.nan, 4: math.nan, 7: math.nan}),
        ("fp16", "512tok", {1: 1e4, 2: 1e4, 7: 1e4}),
    ],
    ids=["fp32", "fp16"],
)
def test_reading_late_leaves_the_same_run(
    train, tmp_path, read_numbers, lose, stop_at_look, precision, length, factors
):
    """Losses, gradient norms, skipped steps and the loss scale of fp16 are reported for the correct steps.

    Checkpoints and validations include all steps before them. A run that is stopped in between resumes like an
    uninterrupted one.
    """
    given = {"num_steps": length, "mixed_precision": precision, "keep_checkpoints": 9}
    given |= {"checkpoint_interval": 4, "publish": False}
    skips = []
    for late in (AT_ONCE, A_STEP_LATE):
        read_numbers(late)
        lose(factors)
        said = train(tmp_path / str(late), **given)
        skips.append([line for line in said.splitlines() if "skipped:" in line])
    assert skips[0] == skips[1] and skips[0]
    if precision == "fp32":
        assert [int(line.split()[1]) for line in skips[0]] == [3, 4, 7]
    whole = left_by(tmp_path / "0")
    assert left_by(tmp_path / "1") == whole
    progress, _ = whole[1][-1]
    assert progress["step"] == 8 and (progress["loss_scale"] > 1) == (precision == "fp16")

    lose(factors)
    stop_at_look(10)
    assert "stopped    at step" in train(tmp_path / "parts", **given)
    _, checkpoints = left_by(tmp_path / "parts")
    stopped = checkpoints[-1][0]["step"]
    assert 4 < stopped < 8
    lose({step - stopped: factor for step, factor in factors.items()})
    stop_at_look(10**6)
    train(tmp_path / "parts", **given)
    metrics, checkpoints = left_by(tmp_path / "parts")
    assert metrics == whole[0] and checkpoints[-1] == whole[1][-1]


@pytest.mark.parametrize("late", [AT_ONCE, A_STEP_LATE])
def test_bad_samples_are_those_of_the_last_bad_step(
    train, tmp_path, read_numbers, lose, monkeypatch, late
):
    """The first eight samples are named, also if the next step was good and has been launched already."""
    drawn = {}

    def noted(loader, step, _step=Loader.step):
        batches = _step(loader, step)
        (drawn[step + 1],) = [batch.samples for batch in batches]
        return batches

    monkeypatch.setattr(Loader, "step", noted)
    read_numbers(late)
    lose({2: math.nan, 3: math.nan})
    said = "of 2 steps in a row was not finite; the last one is step 3, with the samples "
    with pytest.raises(UserError, match=said) as told:
        train(tmp_path, eval_interval=0, checkpoint_interval=6, max_skipped_steps=2, batch_size=9)
    named = ", ".join(f"{name} window {window}" for name, window in drawn[3][:8])
    assert max(drawn) == 3 + late and f"samples {named}, .... " in str(told.value)


def test_a_step_without_counted_labels_has_the_loss_0():
    sums = StepSums(*torch.zeros(3), host_numbers=torch.empty(0))
    assert loop.mean_loss_and_norm(sums, torch.tensor(8.0)) == (0, 0, 8)
