"""Running ahead of the device: a step's numbers are read when the next is under way, and nothing else changes."""

import itertools
import json

import pytest
import torch

from mamba_fsdp.data.loader import Loader
from mamba_fsdp.errors import UserError
from mamba_fsdp.trainer import loop
from mamba_fsdp.trainer.stopping import StopRequest

pytestmark = pytest.mark.torch22


@pytest.fixture(params=[0, 1], ids=["at once", "a step late"])
def ahead(request, monkeypatch):
    monkeypatch.setitem(loop.AHEAD, "cpu", request.param)
    return request.param


@pytest.fixture
def lose(monkeypatch):
    """lose(factor): the loss of step n (from 1) of a run of one micro-batch a step is multiplied by factor(n)."""
    true_loss = loop.batch_loss

    def change(factor):
        steps = itertools.count(1)

        def loss(module, batch):
            loss = true_loss(module, batch)
            return loss * factor(next(steps)) if torch.is_grad_enabled() else loss

        monkeypatch.setattr(loop, "batch_loss", loss)

    return change


def left_by(run, metrics_of):
    """What a run leaves: metrics, and of each checkpoint the train state and the bytes of its tensors."""
    checkpoints = sorted(run.glob("checkpoints/step_*"))
    states = [
        json.loads((path / "state.json").read_text())["state"]["progress"] for path in checkpoints
    ]
    states = [
        {
            name: value
            for name, value in state.items()
            if name not in ("first_started", "step_seconds")
        }
        for state in states
    ]
    return metrics_of(run), states, [next(path.glob("rank_*")).read_bytes() for path in checkpoints]


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision, factor, skipped",
    [
        ("fp32", lambda step: float("nan") if step in (4, 5, 9) else 1.0, [4, 5, 9]),
        ("fp16", lambda step: 1e4 if step < 3 or step == 7 else 1.0, None),
    ],
)
def test_reading_late_leaves_the_same_run(
    train, tmp_path, metrics_of, monkeypatch, lose, precision, factor, skipped
):
    """Losses, gradient norms, skips and the scale of fp16 are those of the steps they are told for; checkpoints and
    validations see the steps up to theirs, and a run that is asked to stop in between resumes as the unbroken one."""
    given = {
        "num_steps": 11,
        "checkpoint_interval": 4,
        "mixed_precision": precision,
        "keep_checkpoints": 9,
        "publish": False,
    }
    said = {}
    for late in (0, 1):
        monkeypatch.setitem(loop.AHEAD, "cpu", late)
        lose(factor)
        said[late] = train(tmp_path / str(late), **given)
    told = [[line for line in said[late].splitlines() if "skipped:" in line] for late in (0, 1)]
    assert told[0] == told[1] and told[0]
    if skipped:
        assert [int(line.split()[1]) for line in told[0]] == skipped
    whole = left_by(tmp_path / "0", metrics_of)
    assert left_by(tmp_path / "1", metrics_of) == whole

    lose(factor)
    looks = itertools.count(1)
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "look", lambda request: next(looks) >= 12)
        assert "stopped    at step" in train(tmp_path / "parts", **given)
    stopped = left_by(tmp_path / "parts", metrics_of)[1][-1]["step"]
    assert 4 < stopped < 11
    lose(lambda step: factor(step + stopped))
    train(tmp_path / "parts", **given)
    metrics, states, tensors = left_by(tmp_path / "parts", metrics_of)
    assert metrics == whole[0] and tensors[-1] == whole[2][-1] and states[-1] == whole[1][-1]


@pytest.mark.parametrize("at", [2, 3])
def test_a_stop_is_heard_with_a_step_under_way(train, tmp_path, metrics_of, monkeypatch, ahead, at):
    """The step under way is counted and saved too, but for a step before a checkpoint: then there is none."""
    looks = itertools.count()  # the first is before the first step
    monkeypatch.setattr(StopRequest, "look", lambda request: next(looks) >= at)
    said = train(tmp_path, eval_interval=0, checkpoint_interval=3)
    stopped = min(at + ahead, 3)
    assert f"stopped    at step {stopped}" in said and metrics_of(tmp_path)[-1]["step"] == stopped
    assert [path.name[-1] for path in tmp_path.glob("checkpoints/step_*")] == [str(stopped)]


@pytest.mark.parametrize("eval_interval", [0, 3])
def test_a_stop_before_the_first_step_ends_at_once(train, tmp_path, monkeypatch, eval_interval):
    """During the validation at the start too; a resumed run has lost nothing either."""
    for steps in (0, 2):
        if steps:
            train(tmp_path, num_steps=steps, eval_interval=eval_interval)
        with monkeypatch.context() as patch:
            patch.setattr(StopRequest, "look", lambda request: True)
            said = train(tmp_path, num_steps=4, eval_interval=eval_interval)
        assert "stopped    before the first step of this start (" in said
        assert len(list(tmp_path.glob("checkpoints/step_*"))) == min(steps, 1)
        status = json.loads((tmp_path / "status.json").read_text())
        assert (status["status"], status["step"]) == ("stopped", steps)


def test_bad_samples_are_those_of_the_last_bad_step(train, tmp_path, lose, ahead, monkeypatch):
    """Also where the next step is good and has been taken by then."""
    drawn, read = {}, Loader.step

    def noted(loader, step):
        batches = read(loader, step)
        drawn[step + 1] = [
            f"{name} window {window}" for batch in batches for name, window in batch.samples
        ]
        return batches

    monkeypatch.setattr(Loader, "step", noted)
    lose(lambda step: float("nan") if step in (2, 3) else 1.0)
    with pytest.raises(
        UserError, match="of 2 steps in a row was not finite; the last is step 3, of the samples "
    ) as said:
        train(tmp_path, eval_interval=0, checkpoint_interval=6, max_skipped_steps=2)
    assert max(drawn) == 3 + ahead and f"samples {', '.join(drawn[3])}. " in str(said.value)
