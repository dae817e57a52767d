"""Loss spikes: the run returns to its newest checkpoint, passes over what it is asked to, and accounts for it."""

import contextlib
import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from mamba_fsdp.checkpoint import checkpointer
from mamba_fsdp.checkpoint.files import PieceReader
from mamba_fsdp.checkpoint.folder import problems
from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run_layout import committed
from mamba_fsdp.train import loop, run, spikes
from mamba_fsdp.verbs import audit

GIVEN = {
    "num_steps": 16,
    "checkpoint_interval": 4,
    "loss_spike_factor": 2,
    "sample_log": True,
    "publish": False,
    "keep_checkpoints": 9,
    "schedule": "constant",
    "eval_interval": 4,
}
SKIPPING = {**GIVEN, "loss_spike_skip": True}


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """What takes 16 steps takes 4."""
    monkeypatch.setattr(spikes, "FEWEST", 4)


@pytest.fixture
def spoil(monkeypatch):
    """spoil(sample): whether the loss of a batch that holds this (source, window) is ten times what it is."""
    true_loss = loop.batch_loss

    def change(bad):
        monkeypatch.setattr(
            loop,
            "batch_loss",
            lambda parallel, batch: (
                true_loss(parallel, batch)
                * (10 if torch.is_grad_enabled() and any(map(bad, batch.samples)) else 1)
            ),
        )

    return change


@pytest.fixture
def samples_of(train, tmp_path, spoil):
    """samples_of(step): those of that step of an undisturbed run."""
    drawn = []
    spoil(lambda sample: drawn.append(sample))
    train(tmp_path / "undisturbed", **GIVEN)
    return lambda step: drawn[2 * step - 2 : 2 * step]


def left_by(run, metrics_of):
    """Metrics, samples, and of each checkpoint the train state and the bytes of its tensors."""
    folders = sorted(run.glob("checkpoints/step_*"))
    states = [
        json.loads((folder / "state.json").read_text())["state"]["progress"] for folder in folders
    ]
    states = [
        {
            name: value
            for name, value in state.items()
            if name not in ("first_started", "step_seconds")
        }
        for state in states
    ]
    steps = [line for line in (run / "samples.jsonl").read_text().splitlines() if "draws" in line]
    return (
        metrics_of(run),
        steps,
        states,
        [next(folder.glob("rank_*")).read_bytes() for folder in folders],
    )


def events_of(run):
    return [
        event
        for line in (run / "events.jsonl").read_text().splitlines()
        if (event := json.loads(line))["event"] == "rollback"
    ]


def test_the_samples_around_a_spike_are_passed_over_and_accounted_for(
    train, tmp_path, metrics_of, monkeypatch, spoil, samples_of, capsys
):
    """Also where the next step is under way by then, and where the run is killed after its rollback and resumes."""
    bad = samples_of(10)
    for late in (0, 1):
        monkeypatch.setitem(loop.AHEAD, "cpu", late)
        spoil(bad.__contains__)
        said = train(tmp_path / str(late), **SKIPPING)
        assert (
            "step 10: loss 37.4, usual 3.994; rolled back to step_00000008, 4 samples passed over so far"
            in said
        )
    whole = left_by(tmp_path / "0", metrics_of)
    assert left_by(tmp_path / "1", metrics_of) == whole
    metrics, steps, states, _ = whole
    assert [entry["step"] for entry in metrics if "loss" in entry] == list(range(1, 17))
    assert [entry.get("passed_over", 0) for entry in metrics if "loss" in entry] == [0] * 8 + [
        4
    ] * 8
    draws = [json.loads(line) for line in steps]
    assert draws[8]["skipped"] == {"train": [16, 20]} and draws[8]["draws"] == {"train": [20, 22]}
    assert (states[-1]["samples"], states[-1]["passed_over"], states[-1]["rollbacks"]) == (32, 4, 1)
    [event] = events_of(tmp_path / "0")
    assert (event["step"], event["to"], event["skipped"]) == (10, 8, {"train": [16, 20]})
    assert event["loss"] > 2 * event["mean"]
    capsys.readouterr()
    audit.main(str(tmp_path / "0"))
    assert "passed over    4 samples" in capsys.readouterr().out

    def killed_in(step):
        def step_or_end(parts, *rest, real=loop.take_step, **more):
            if parts.state.step + 1 == step and parts.state.rollbacks:
                raise ZeroDivisionError
            return real(parts, *rest, **more)

        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(loop, "take_step", step_or_end)
            train(tmp_path / "parts", **SKIPPING)

    killed_in(9)  # resumes before the spike, and meets it again
    killed_in(15)
    train(tmp_path / "parts", **SKIPPING)
    assert left_by(tmp_path / "parts", metrics_of) == whole
    (tmp_path / "0/samples.jsonl").write_text(
        (tmp_path / "0/samples.jsonl")
        .read_text()
        .replace('"skipped": {"train": [16, 20]}', '"skipped": {"train": [16, 19]}')
    )
    with pytest.raises(UserError, match="train"):
        audit.main(str(tmp_path / "0"))


def test_a_spike_that_does_not_come_again_leaves_no_trace(
    train, tmp_path, metrics_of, spoil, samples_of, monkeypatch
):
    """Nor is the checkpoint read twice."""
    bad = samples_of(10)
    monkeypatch.setattr(PieceReader, "read", None)
    spoil(lambda sample: sample in bad and (bad.clear() or True))
    assert "whose steps come again" in train(tmp_path / "run", **GIVEN)
    run, undisturbed = (left_by(tmp_path / name, metrics_of) for name in ("run", "undisturbed"))
    assert run[1] == undisturbed[1] and run[3] == undisturbed[3]


def test_while_a_save_hangs_a_rollback_waits(
    train, tmp_path, metrics_of, spoil, samples_of, monkeypatch
):
    """Training continues, which is told, and returns to what hung once that is committed."""
    bad, hangs = samples_of(10), threading.Event()
    spoil(lambda sample: sample in bad and (bad.clear() or True))

    def write(path, *rest, _write=checkpointer.write_pieces, **named):
        if "step_00000008" in path.parent.name:
            monkeypatch.setattr(checkpointer, "SECONDS_OF_SILENCE", 0.3)
            assert hangs.wait(400)
        return _write(path, *rest, **named)

    def take(parts, *rest, _take=loop.take_step, **named):
        if parts.state.step == 12 and parts.checkpointer.pending:
            monkeypatch.setattr(checkpointer, "SECONDS_OF_SILENCE", 400)
            hangs.set()
        while hangs.is_set() and parts.checkpointer.is_writing():
            time.sleep(0.01)
        return _take(parts, *rest, **named)

    monkeypatch.setattr(checkpointer, "write_pieces", write)
    monkeypatch.setattr(loop, "take_step", take)
    said = train(tmp_path / "run", **{**GIVEN, "checkpoint_interval": 8})
    assert "usual 3.994; no rollback while a save hangs" in said
    assert (
        "step 10: loss 37.4, usual 3.994; rolled back to step_00000008, whose steps come again"
        in said
    )
    run, undisturbed = (left_by(tmp_path / name, metrics_of) for name in ("run", "undisturbed"))
    assert run[1] == undisturbed[1] and run[3][-1] == undisturbed[3][-1]


@pytest.mark.parametrize(
    "saved_meanwhile, hang_after, returns", [(8, [], True), (8, [True], False), (12, [], False)]
)
def test_a_rollback_that_waited_leads_before_its_spike_or_nowhere(
    saved_meanwhile, hang_after, returns
):
    """Or waits on, where a local save hangs on; nowhere where a newer checkpoint was saved before its turn came."""
    pending, said = {False: None, True: None}, []
    parts = SimpleNamespace(
        settings=SimpleNamespace(training=SimpleNamespace(loss_spike_factor=2)),
        state=SimpleNamespace(step=10, recent_losses=[1.0] * 4),
        checkpointer=SimpleNamespace(pending=pending, newest_step=saved_meanwhile),
    )
    saver = SimpleNamespace(
        spike=None,
        wait=lambda: None,
        recorder=SimpleNamespace(display=SimpleNamespace(line=said.append)),
    )
    for parts.state.step in (10, 11, 13):
        spikes.refuse_spike(parts, 9.0, saver)
    [line] = said
    assert "no rollback while a save hangs" in line and saver.spike == (10, 9.0, 1.0)
    for local in {False, True} - {*hang_after}:
        del pending[local]
    with pytest.raises(spikes.LossSpike) if returns else contextlib.nullcontext():
        spikes.refuse_spike(parts, 1.0, saver)
    assert bool(saver.spike) == bool(pending) and len(said) == 1


def test_a_checkpoint_that_was_damaged_since_it_was_saved_is_passed_over(
    train, tmp_path, spoil, samples_of
):
    bad, checkpoints = samples_of(10), tmp_path / "run/checkpoints"

    def damaged(sample):
        if damage := sample in bad:
            bad.clear()
            file = checkpoints / "step_00000008/rank_00000.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + b"!")
        return damage

    spoil(damaged)
    said = train(tmp_path / "run", **GIVEN, async_checkpoint=False)
    assert (
        "step_00000008 is broken and passed over" in said and "rolled back to step_00000004" in said
    )
    assert [problems(path, World.alone()) for path in committed(checkpoints)] == [[]] * 4


def test_spikes_without_end_end_the_run(train, tmp_path, spoil, samples_of, monkeypatch):
    bad = samples_of(10)
    spoil(bad.__contains__)
    with pytest.raises(
        UserError, match=r"after 3 rollbacks to .*step_00000008 \(step 10: .*loss_spike_skip=true"
    ):
        train(tmp_path / "run", **GIVEN)
    assert len(events_of(tmp_path / "run")) == 3
    counted = []

    def killed(sample):  # after each rollback
        if sample in bad and len(events_of(tmp_path / "killed")) > len(counted):
            counted.append(sample)
            raise ZeroDivisionError
        return sample in bad

    spoil(killed)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            train(tmp_path / "killed", **GIVEN)
    with pytest.raises(UserError, match="after 3 rollbacks to .*step_00000008"):
        train(tmp_path / "killed", **GIVEN)
    assert len(events_of(tmp_path / "killed")) == 3
    spoil(bad.__contains__)  # who was told begins anew
    with pytest.raises(UserError, match="after 3 rollbacks"):
        train(tmp_path / "killed", **GIVEN)
    assert len(events_of(tmp_path / "killed")) == 6
    tries = []  # where events can't be noted, as on a full disk

    def roll_back(*given, roll_back=run.roll_back):
        tries.append(given)
        assert len(tries) < 5
        roll_back(*given)

    monkeypatch.setattr(run, "roll_back", roll_back)
    monkeypatch.setattr(spikes, "add_event", lambda *given, **facts: None)
    with pytest.raises(UserError, match="after 3 rollbacks"):
        train(tmp_path / "unnoted", **GIVEN)
    assert len(tries) == 4 and not events_of(tmp_path / "unnoted")


def test_before_the_first_checkpoint_a_spike_is_a_step_like_others(
    train, tmp_path, spoil, samples_of
):
    bad = samples_of(10)
    spoil(bad.__contains__)
    assert "rolled back" not in train(tmp_path / "run", **{**GIVEN, "checkpoint_interval": 100})
