"""Whole runs: equal runs are equal, interrupted runs end as unbroken ones do, and what is wrong is said."""

import dataclasses
import json
import re
import time

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.run.lease import Holder
from mamba_fsdp.run.records import read_events, read_status
from tests.support.checkpoints import equal, flip


def test_two_equal_runs_are_equal_bit_for_bit(train, tmp_path, metrics_of, weights_of):
    for name in "ab":
        train(tmp_path / name, deterministic=True)
    assert metrics_of(tmp_path / "a") == metrics_of(tmp_path / "b")
    assert equal(weights_of(tmp_path / "a"), weights_of(tmp_path / "b"))
    entries = metrics_of(tmp_path / "a")
    assert [entry["tokens"] for entry in entries if "loss" in entry] == [
        64,
        128,
        192,
        256,
        320,
        384,
    ]
    assert [entry["step"] for entry in entries if "val_loss" in entry] == [0, 3, 6]


def test_it_learns(train, tmp_path, metrics_of):
    train(tmp_path, num_steps=150, eval_interval=150, checkpoint_interval=1000, report_interval=50)
    losses = [entry["val_loss"] for entry in metrics_of(tmp_path) if "val_loss" in entry]
    assert losses[-1] < losses[0] - 0.7


def goodput_facts(run):
    """(when the run first began, seconds of its steps), as its newest checkpoint has them."""
    progress = json.loads(sorted(run.glob("checkpoints/step_*/state.json"))[-1].read_text())[
        "state"
    ]["progress"]
    return progress["first_started"], progress["step_seconds"]


def test_a_run_in_parts_is_the_unbroken_run(train, tmp_path, metrics_of, weights_of, monkeypatch):
    """Also between reports: the mean loss of a report interval survives the break, as does what goodput is made of."""
    common = {"report_interval": 4, "num_steps": 8, "schedule": "constant"}
    train(tmp_path / "whole", **common)
    began = time.time() - 1000  # of the command that has started the ranks
    monkeypatch.setenv("COMMAND_BEGAN", str(began))
    train(tmp_path / "parts", **{**common, "num_steps": 2})
    first, seconds = goodput_facts(tmp_path / "parts")
    assert first == began
    train(tmp_path / "parts", **common)
    assert equal(weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts"))
    later, more = goodput_facts(tmp_path / "parts")
    assert first == later and 0 < seconds < more < time.time() - began
    reports = [
        [entry for entry in metrics_of(tmp_path / run) if "loss" in entry]
        for run in ("whole", "parts")
    ]
    assert reports[0][-1] == reports[1][-1]
    told = [
        (event["event"], event["step"], event.get("from"))
        for event in read_events(tmp_path / "parts")
    ]
    assert told == [
        ("started", 0, "the start"),
        ("checkpoint", 2, None),
        ("finished", 2, None),
        ("started", 2, "checkpoint step_00000002"),
        *(("checkpoint", step, None) for step in (4, 6, 8)),
        ("finished", 8, None),
    ]


def test_a_dry_run_says_what_is_coming_and_writes_nothing(train, tmp_path):
    said = train(tmp_path / "run", dry_run=True)
    assert not (tmp_path / "run").exists()
    words = re.findall(r"^\w+", said, flags=re.MULTILINE)
    assert words == ["model", "kernels", "memory", "data", "steps"]
    for line in (
        "model      custom .from demo.: 5,... parameters, 2 layers, fp32, no sharding on 1 x cpu",
        "kernels    reference: conv, scan, norm, loss",
        "memory     at least .* a device: weights 22.0 kB, gradients 22.0 kB, moments 43.9 kB, "
        "activations .*",
        "steps      6 of 2 x 32 = 64 tokens; 2.. MFLOP each, 1... MFLOP in all",
    ):
        assert re.search(f"^{line}$", said, re.MULTILINE), (line, said)
    assert "of the machine's" in train(
        tmp_path, dry_run=True, batch_size=10**7, use_dummy_dataset=True, validation_path="auto"
    )
    said = train(tmp_path, dry_run=True, num_steps=10**6, vocab_size=999, warmup_steps="2M")
    for warning in ("read the data .* times; set", "set vocab_size=64", "2 times as long as the s"):
        assert re.search(f"^warning .*{warning}", said, re.MULTILINE), (warning, said)
    train(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    newest = tmp_path / "run/checkpoints/step_00000006"
    assert f"resumes    from {newest}" in train(tmp_path / "run", dry_run=True)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    with pytest.raises(UserError, match="d_model=32 .there 16.; .* another load_ckpt_path"):
        train(tmp_path / "new", d_model=32, dry_run=True, load_ckpt_path=tmp_path / "run")
    assert f"starting   from model and optimiser in {newest}, the data from its start" in train(
        tmp_path / "new", dry_run=True, load_ckpt_path=tmp_path / "run"
    )
    flip(newest / "rank_00000.safetensors")
    said = train(tmp_path / "run", dry_run=True)
    assert f"{newest} is broken and is skipped" in said and f"resumes    from {newest}" not in said


def test_a_start_says_which_settings_are_not_those_of_the_last_start(train, tmp_path):
    assert "settings " not in train(tmp_path, learning_rate=0.003, num_steps=2)
    said = train(tmp_path, learning_rate=0.001, num_steps=2, dry_run=True, load_ckpt_path=tmp_path)
    assert "changed since the last start: learning_rate=0.001 (before 0.003)\n" in said


@pytest.mark.parametrize(
    "interval, said",
    [(4, "validation loss after step 4 is nan"), (0, "step 4 could not .* finite")],
)
def test_a_run_whose_weights_are_not_finite_fails(train, tmp_path, interval, said):
    """Without a checkpoint of these weights: the same command with another learning rate resumes from the one before."""
    given = {"eval_interval": interval, "checkpoint_interval": 1}
    train(tmp_path, num_steps=1, **given)
    with pytest.raises(UserError, match=said):
        train(tmp_path, num_steps=4, learning_rate=1e308, **given)
    assert read_status(tmp_path)["status"] == "failed"
    assert [path.name for path in tmp_path.glob("*/step_*")] == ["step_00000001"] * 2


def test_a_model_that_can_not_be_published_leaves_a_failed_run(train, tmp_path, monkeypatch):
    """And the same command publishes it, without another step."""

    def full_disk(*_, **__):
        raise UserError("no room")

    with monkeypatch.context() as patched, pytest.raises(UserError, match="no room"):
        patched.setattr("mamba_fsdp.interop.convert.write_model", full_disk)
        train(tmp_path)
    assert read_status(tmp_path)["status"] == "failed"
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert "already has all its 6 steps; raise num_steps to train on" in train(tmp_path)
    assert "is already past 2: it has 6 steps" in train(tmp_path, num_steps=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert read_status(tmp_path)["status"] == "finished"
    assert list(tmp_path.glob("pth/*/consolidated.00.pth"))


@pytest.mark.slow
def test_starting_from_another_run(train, tmp_path, metrics_of):
    """A .pth file gives the model; a folder the optimiser too; resuming_dataset the data's position too."""
    train(tmp_path / "first", num_steps=4)
    pth = next((tmp_path / "first").glob("pth/*/consolidated.00.pth"))
    *_, last = [entry for entry in metrics_of(tmp_path / "first") if "val_loss" in entry]
    losses = {}
    for name, given in {
        "pth": {"load_ckpt_path": pth},
        "folder": {"load_ckpt_path": tmp_path / "first"},
        "step": {"load_ckpt_path": tmp_path / "first" / "checkpoints" / "step_00000004"},
        "data": {"load_ckpt_path": tmp_path / "first", "resuming_dataset": True},
    }.items():
        train(tmp_path / name, num_steps=3, **given)
        validation, *entries = metrics_of(tmp_path / name)
        assert validation["val_loss"] == last["val_loss"]  # the first run's weights
        losses[name] = [entry["loss"] for entry in entries if "loss" in entry]
    assert losses["pth"][0] == losses["folder"][0] and losses["pth"][1] != losses["folder"][1]
    assert losses["folder"] == losses["step"] and losses["data"][0] != losses["folder"][0]


@pytest.mark.parametrize(
    "setting, value, message",
    [
        ("dataset_path", "/nowhere", "/nowhere: no such folder"),
        ("datasets", "train,typo", "typo"),
        ("validation_path", "/nowhere", "/nowhere"),
        ("vocab_size", 32, "set vocab_size=64"),
        ("load_ckpt_path", "/nowhere", "/nowhere"),
        ("seq_length", 10**7, "seq_length"),
        ("save_ckpt_path", "/proc/nowhere", "save_ckpt_path /proc/nowhere"),
        ("save_ckpt_path", "tests/trainer", "save_ckpt_path tests/trainer is not a run folder"),
    ],
)
def test_mistakes_found_at_the_start(train, tmp_path, capsys, setting, value, message):
    """Those in the data before the model is told."""
    with pytest.raises(UserError, match=message):
        train(tmp_path / "run", **{setting: value})
    if setting in ("dataset_path", "datasets", "validation_path", "vocab_size"):
        assert "model " not in capsys.readouterr().out


def test_a_start_that_fails_takes_back_the_word_of_the_one_before(train, tmp_path):
    """Nobody reads `finished` of a run whose last start came to nothing; a good start mends it. What is refused before
    it has the folder changes nothing there."""
    train(tmp_path)
    with pytest.raises(UserError):
        train(tmp_path, dataset_path="/nowhere")
    assert read_status(tmp_path)["status"] == "finished"
    with pytest.raises(UserError) as failure:
        train(tmp_path, d_model=32)
    status = read_status(tmp_path)
    assert (status["status"], status["step"]) == ("failed", 6) and str(failure.value) in status[
        "reason"
    ]
    train(tmp_path)
    assert read_status(tmp_path)["status"] == "finished"


def test_a_run_whose_folder_was_taken_over_writes_nothing_more(train, tmp_path, change_loss):
    """It stood still for so long that another counted it as dead. Neither metrics nor checkpoint nor status."""
    before = {}

    def suspended(state, true_loss):
        if state.step == 3 and not before:
            other = dataclasses.replace(Holder.this_process(), token="x", host="elsewhere", pid=7)
            (tmp_path / "lease.json").write_text(json.dumps(dataclasses.asdict(other)))
            before.update(
                {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
            )
        return true_loss()

    change_loss(suspended)
    with pytest.raises(UserError, match="in use by process 7 on elsewhere"):
        train(tmp_path, checkpoint_interval=1, async_checkpoint=False, eval_interval=0)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_position_that_means_nothing_is_refused_with_a_way_on(train, tmp_path):
    """Another folder takes the weights and begins the data anew; it resumes as if unbroken."""
    first = tmp_path / "first"
    train(first, num_steps=3)
    words = "seed is 5, but .* was saved with seed 2023.* load_ckpt_path=RUN without"
    with pytest.raises(UserError, match=words):
        train(first, num_steps=9, seed=5)
    said = train(tmp_path / "run", load_ckpt_path=first, num_steps=3, seed=5)
    assert "the data from its start" in said
