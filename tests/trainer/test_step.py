"""Tests the steps of mamba_fsdp.trainer.loop: the statistics of a step are read during the next step, and steps whose
loss is not finite are skipped."""

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
def read_stats(monkeypatch):
    """Returns a function read_stats(late), which delays reading the statistics of a step by this many steps."""
    return lambda late: monkeypatch.setitem(loop.STEPS_AHEAD, "cpu", late)


@pytest.fixture
def lose(monkeypatch):
    """Returns a function lose(factors), which multiplies the loss of step n, counted from 1, by factors[n] in a run
    with one micro-batch per step."""
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
    """Returns a function stop_at_look(n), which makes the n-th and all later checks find a request to stop. The first
    check is before the first step."""

    def stop(number):
        looks = itertools.count(1)
        monkeypatch.setattr(StopRequest, "check", lambda request: next(looks) >= number)

    return stop


def results_of(run):
    """Returns (metrics, [(progress without times, bytes of the tensor file) of each checkpoint]) of a run."""
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
    train, tmp_path, read_stats, lose, stop_at_look, precision, length, factors
):
    """A run has the same metrics, checkpoints and skipped steps whether the statistics of a step are read at once or
    a step later.

    If it is stopped while the statistics of a step have not been read, it resumes like an uninterrupted run.
    """
    given = {"num_steps": length, "mixed_precision": precision, "keep_checkpoints": 9}
    given |= {"checkpoint_interval": 4, "publish": False}
    skips = []
    for late in (AT_ONCE, A_STEP_LATE):
        read_stats(late)
        lose(factors)
        printed = train(tmp_path / str(late), **given)
        skips.append([line for line in printed.splitlines() if "skipped:" in line])
    assert skips[0] == skips[1] and skips[0]
    if precision == "fp32":
        assert [int(line.split()[1]) for line in skips[0]] == [3, 4, 7]
    whole = results_of(tmp_path / "0")
    assert results_of(tmp_path / "1") == whole
    progress, _ = whole[1][-1]
    assert progress["step"] == 8 and (progress["loss_scale"] > 1) == (precision == "fp16")

    lose(factors)
    stop_at_look(10)
    assert "stopped    at step" in train(tmp_path / "parts", **given)
    _, checkpoints = results_of(tmp_path / "parts")
    stopped = checkpoints[-1][0]["step"]
    assert 4 < stopped < 8
    lose({step - stopped: factor for step, factor in factors.items()})
    stop_at_look(10**6)
    train(tmp_path / "parts", **given)
    metrics, checkpoints = results_of(tmp_path / "parts")
    assert metrics == whole[0] and checkpoints[-1] == whole[1][-1]


@pytest.mark.parametrize("late", [AT_ONCE, A_STEP_LATE])
def test_bad_samples_are_those_of_the_last_bad_step(
    train, tmp_path, read_stats, lose, monkeypatch, late
):
    """If too many steps in a row are skipped, the error lists the first eight samples of the last skipped step, even
    if the next step has already been launched."""
    drawn = {}

    def noted(loader, step, _step=Loader.step):
        batches = _step(loader, step)
        (drawn[step + 1],) = [batch.samples for batch in batches]
        return batches

    monkeypatch.setattr(Loader, "step", noted)
    read_stats(late)
    lose({2: math.nan, 3: math.nan})
    message = "of 2 steps in a row was not finite; the last one is step 3, with the samples "
    with pytest.raises(UserError, match=message) as error:
        train(tmp_path, eval_interval=0, checkpoint_interval=6, max_skipped_steps=2, batch_size=9)
    named = ", ".join(f"{name} window {window}" for name, window in drawn[3][:8])
    assert max(drawn) == 3 + late and f"samples {named}, .... " in str(error.value)


def test_a_step_without_counted_labels_has_the_loss_0():
    sums = StepSums(*torch.zeros(3), host_numbers=torch.empty(0))
    assert loop.mean_loss_and_norm(sums, torch.tensor(8.0)) == (0, 0, 8)
