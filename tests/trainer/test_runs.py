"""Tests whole runs: a run that was interrupted equals an uninterrupted one, changes and failures are recorded, and
mistakes are reported."""

import json
import re
import time

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.run.records import read_events, read_status
from mamba_fsdp.trainer.run_folder import RunFolder
from tests.support.checkpoints import flip, metrics_of, weights_of
from tests.support.compare import equal


def progress_of(run):
    """Returns the train state in the newest checkpoint of a run."""
    newest = sorted(run.glob("checkpoints/step_*/state.json"))[-1]
    return json.loads(newest.read_text())["state"]["progress"]


def test_an_interrupted_run_equals_an_uninterrupted_one(train, tmp_path, monkeypatch):
    """A run that was interrupted between two reports ends with the same weights and metrics as an uninterrupted one.
    The mean loss of the interval and the times for the goodput are restored."""
    common = {"report_interval": 4, "num_steps": 8, "schedule": "constant", "deterministic": True}
    train(tmp_path / "whole", **common)
    began = time.time() - 1000  # when the launcher started the command
    monkeypatch.setenv("COMMAND_BEGAN", str(began))
    train(tmp_path / "parts", **{**common, "num_steps": 2})
    first = progress_of(tmp_path / "parts")
    assert first["first_started"] == began
    train(tmp_path / "parts", **common)
    assert equal(weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts"))
    later = progress_of(tmp_path / "parts")
    assert first["first_started"] == later["first_started"]
    assert 0 < first["step_seconds"] < later["step_seconds"] < time.time() - began
    whole, parts = (
        [entry for entry in metrics_of(tmp_path / run) if "loss" in entry]
        for run in ("whole", "parts")
    )
    assert [entry["tokens"] for entry in whole] == [256, 512] and whole[-1] == parts[-1]


def test_a_run_from_before_the_tuned_recipe_resumes_with_its_own(train, tmp_path):
    """A run whose config.yaml lacks the setting `recipe`, because it is older than this setting, resumes with the
    published recipe."""
    common = {"schedule": "constant", "deterministic": True}
    train(tmp_path / "whole", num_steps=4, recipe="published", **common)
    train(tmp_path / "old", num_steps=2, recipe="published", **common)
    file = tmp_path / "old/config.yaml"
    file.write_text(
        re.sub(r"  (recipe|muon_momentum|muon_coefficients): .*\n", "", file.read_text())
    )
    printed = train(tmp_path / "old", num_steps=4, **common)
    assert "training   adamw, learning rate 0.01 (constant), recipe published" in printed
    assert equal(weights_of(tmp_path / "whole"), weights_of(tmp_path / "old"))


def test_a_dry_run_describes_the_training_and_writes_nothing(train, tmp_path):
    printed = train(tmp_path / "run", dry_run=True)
    assert not (tmp_path / "run").exists()
    words = re.findall(r"^\w+", printed, flags=re.MULTILINE)
    assert words == ["run", "training", "model", "kernels", "memory", "data", "steps", "time"]
    for line in (
        f"run        {tmp_path}/run",
        "training   muon, learning rate 0.01 .cosine., recipe tuned, seed \\d+",
        "model      custom .from demo.: 5,... parameters, 2 layers, fp32, no sharding on 1 x cpu",
        "kernels    reference: conv, scan, norm, loss",
        "memory     about .* a device: weights 22.0 kB, gradients 22.0 kB, moments [23]\\d[.]\\d kB, "
        "activations .*",
        "data       .*/train .* validation: .*/validation",
        "steps      6 of 2 x 32 = 64 tokens; 2.. MFLOP each, 1... MFLOP in all",
        "time       unknown before the first step; .*mamba-fsdp plan estimates it for GPUs",
    ):
        assert re.search(f"^{line}$", printed, re.MULTILINE), (line, printed)


def test_a_dry_run_warns_of_settings_that_are_probably_mistakes(train, tmp_path):
    """A dry run warns about settings that are probably mistakes, and reports if transformers does not support the
    model."""
    wrong = {"batch_size": 10**6, "num_steps": 10**6, "vocab_size": 999, "warmup_steps": "2M"}
    printed = train(tmp_path, dry_run=True, layers="mamba1+mlp", **wrong)
    for warning in (
        "warning .*of the machine's .* GB",
        "warning .*read the data .* times; set",
        "warning .*set vocab_size=64",
        "warning .*2 times as long as the s",
        "export     transformers does not have a model with mamba1.mlp; export --format=pth works$",
    ):
        assert re.search(f"^{warning}", printed, re.MULTILINE), (warning, printed)


def test_changes_between_starts_are_recorded_with_their_step(train, tmp_path):
    """The event of each start contains the settings that have changed since the previous start, the step, and the name
    of the file with all settings of the start."""
    run = tmp_path / "run"
    train(run, num_steps=2)
    train(run, num_steps=4, learning_rate=100.0)
    starts = [event for event in read_events(run) if event["event"] == "started"]
    assert "changed" not in starts[0] and starts[1]["step"] == 2
    assert "learning_rate=100.0 (before 0.01)" in starts[1]["changed"]
    facts = {"peak_learning_rate": 100.0, "global_batch": 2, "settings": "config.2.yaml"}
    assert facts.items() <= starts[1].items() and starts[1]["weights"].keys() == {"train"}
    assert "learning_rate: 0.01\n" in (run / starts[0]["settings"]).read_text()
    assert (run / "config.2.yaml").read_text() == (run / "config.yaml").read_text()


def test_a_dry_run_finds_the_start_of_the_run_and_changes_nothing(train, tmp_path):
    """A dry run prints the checkpoint from which the run would resume and the settings that differ from the last
    start. It changes no file."""
    run = tmp_path / "run"
    assert "settings " not in train(run, num_steps=2, checkpoint_interval=1)
    (run / "STOP").touch()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    newest = run / "checkpoints/step_00000002"
    printed = train(run, dry_run=True, learning_rate=0.001)
    assert f"resumes    from {newest}" in printed
    speed = "0:00:.. for the remaining steps, at the mean speed of the first 2"
    assert re.search(f"^time       {speed}$", printed, re.MULTILINE)
    assert "changed since the last start: learning_rate=0.001 (before 0.01)" in printed
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    with pytest.raises(
        UserError, match="d_model=32 .there 16.; leave out the settings that differ"
    ):
        train(tmp_path / "new", d_model=32, dry_run=True, load_ckpt_path=run)
    printed = train(tmp_path / "new", dry_run=True, load_ckpt_path=run)
    assert f"starting   from model and optimiser in {newest}, the data from its start" in printed
    flip(newest / "rank_00000.safetensors")
    printed = train(run, dry_run=True)
    assert f"{newest} is broken and is skipped" in printed
    older = run / "checkpoints/step_00000001"
    assert (
        printed.count("resumes    from ") == 1 and f"resumes    from {older}, step 1\n" in printed
    )


@pytest.mark.parametrize(
    "interval, message",
    [(4, "validation loss after step 4 is nan"), (0, "step 4 could not .* finite")],
)
def test_a_run_whose_weights_are_not_finite_fails(train, tmp_path, interval, message):
    """A run whose weights are not finite fails without saving them. Its newest checkpoint and its published model
    remain those of the last step with finite weights."""
    given = {"eval_interval": interval, "checkpoint_interval": 1, "recipe": "published"}
    train(tmp_path, num_steps=1, **given)
    with pytest.raises(UserError, match=message):
        train(tmp_path, num_steps=4, learning_rate=1e308, **given)
    assert read_status(tmp_path)["status"] == "failed"
    assert [path.name for path in tmp_path.glob("*/step_*")] == ["step_00000001"] * 2


def test_a_model_that_can_not_be_published_leaves_a_failed_run(train, tmp_path, monkeypatch):
    """If publishing the model fails, the run fails. The same command then publishes the model without another
    step."""

    def full_disk(*_, **__):
        raise UserError("no room")

    with monkeypatch.context() as patched, pytest.raises(UserError, match="no room"):
        patched.setattr("mamba_fsdp.interop.convert.publish", full_disk)
        train(tmp_path, num_steps=3)
    assert read_status(tmp_path)["status"] == "failed"
    before = (tmp_path / "metrics.jsonl").read_bytes()
    printed = train(tmp_path, num_steps=3)
    assert "already has all its 3 steps; raise num_steps to train on" in printed
    printed = train(tmp_path, num_steps=2, dry_run=True)
    assert "has 3 steps already, more than num_steps=2" in printed
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert read_status(tmp_path)["status"] == "finished"
    assert list(tmp_path.glob("pth/*/consolidated.00.pth"))


@pytest.mark.slow
def test_starting_from_another_run(train, tmp_path):
    """A run that starts from a .pth file takes over the model. A run that starts from the folder or a checkpoint of
    another run also takes over the optimizer, and with resuming_dataset=true the position in the data."""
    first = tmp_path / "first"
    train(first, num_steps=2)
    pth = next(first.glob("pth/*/consolidated.00.pth"))
    *_, last = [entry for entry in metrics_of(first) if "val_loss" in entry]
    losses = {}
    for name, given in {
        "pth": {"load_ckpt_path": pth},
        "folder": {"load_ckpt_path": first},
        "step": {"load_ckpt_path": first / "checkpoints" / "step_00000002"},
        "data": {"load_ckpt_path": first, "resuming_dataset": True},
    }.items():
        train(tmp_path / name, num_steps=2, **given)
        validation, *entries = metrics_of(tmp_path / name)
        assert validation["val_loss"] == last["val_loss"]  # equal weights have equal losses
        losses[name] = [entry["loss"] for entry in entries if "loss" in entry]
    assert losses["pth"][0] == losses["folder"][0] and losses["pth"][1] != losses["folder"][1]
    assert losses["folder"] == losses["step"] and losses["data"][0] != losses["folder"][0]
    with pytest.raises(UserError, match="seed is 5, but .*2023.* load_ckpt_path=RUN without"):
        train(first, num_steps=9, seed=5)
    with pytest.raises(UserError, match="was saved with optimizer=muon; .*init_from="):
        train(first, num_steps=9, optimizer="adamw")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"validation_path": "/nowhere"}, "/nowhere"),
        ({"load_ckpt_path": "/nowhere"}, "/nowhere"),
        ({"seq_length": 10**7}, "seq_length"),
        ({"save_ckpt_path": "/proc/nowhere"}, "/proc/nowhere: can't write /proc/nowhere .No such"),
        ({"on_record": "print"}, "on_record=print is not callable"),
        ({"eval_prompts": "gone.txt"}, r"eval_prompts=gone.txt: can't be read \(No such file"),
        ({"eval_prompts": "caf\udce9"}, "can't be read .*surrogates not allowed"),
        ({"eval_prompts": "{tmp_path}/blank.txt"}, "blank.txt contains no prompt"),
        ({"eval_prompts": "w1 w2\n" * 400}, "400 prompts of up to 2 tokens, with 50 after"),
        ({"eval_prompts": "w1", "context_parallel": 2}, "generated with context_parallel=2"),
        ({"eval_prompts": "w1", "use_dummy_dataset": True}, "the run has no validation data"),
        ({"eval_prompts": "w1", "dataset_path": "{corpus}"}, "the store has no tokenizer"),
    ],
)
def test_a_mistake_is_a_line_at_the_start(train, texts, corpus, tmp_path, wrong, message):
    """A mistake in the settings is an error of one line. tests/verbs/test_advice.py tests more mistakes, and that the
    advice in the messages works."""
    (tmp_path / "blank.txt").write_text(" \n")
    given = {"dataset_path": texts / "a", **wrong}
    for name, value in wrong.items():
        if isinstance(value, str):
            given[name] = value.format(tmp_path=tmp_path, corpus=corpus)
    with pytest.raises(UserError, match=message) as mistake:
        train(tmp_path / "run", **given)
    assert "\n" not in str(mistake.value)


def test_a_start_that_fails_changes_the_status_of_the_previous_one(train, tmp_path):
    """A start that fails after it has acquired the run folder sets the status of the run to `failed`, and the next
    successful start sets it to `finished`. A start that fails earlier does not change the status."""
    train(tmp_path, num_steps=1)
    with pytest.raises(UserError):
        train(tmp_path, dataset_path="/nowhere")
    assert read_status(tmp_path)["status"] == "finished"
    with pytest.raises(UserError) as failure:
        train(tmp_path, d_model=32)
    status = read_status(tmp_path)
    assert (status["status"], status["step"]) == ("failed", 1)
    assert str(failure.value) in status["reason"]
    train(tmp_path, num_steps=1)
    assert read_status(tmp_path)["status"] == "finished"


@pytest.mark.slow
def test_a_run_of_epochs_learns_ends_and_is_lengthened(train, tmp_path):
    """num_epochs sets the length of a run, which can be increased later. An epoch consists of the windows of all
    datasets in the mixture."""
    common = {"datasets": "train,other", "batch_size": 64, "eval_interval": 0, "publish": False}
    train(tmp_path, num_epochs=0.9, **common)
    first, *_, last = metrics_of(tmp_path)
    assert last["loss"] < first["loss"] - 0.1
    assert last["source_epochs"] == pytest.approx({"train": 0.9, "other": 0.9}, abs=0.15)
    assert "complete " in train(tmp_path, num_epochs=0.9, **common)
    assert "follows the former schedule" in train(tmp_path, num_epochs=1.8, **common)
    assert metrics_of(tmp_path)[-1]["step"] in (2 * last["step"], 2 * last["step"] - 1)


def test_the_settings_of_a_start_get_a_number_that_no_other_has(tmp_path):
    """Each start with other settings writes them to config.N.yaml with a new number, even if an earlier file of this
    kind was removed. Equal settings are not written again, and no other files remain in the run folder."""
    folder = RunFolder(tmp_path)
    folder.acquire()
    assert folder.write_settings("seed: 1\n") == "config.1.yaml"
    assert folder.write_settings("seed: 2\n") == folder.write_settings("seed: 2\n")
    (tmp_path / "config.1.yaml").unlink()
    assert folder.write_settings("seed: 3\n") == "config.3.yaml"
    folder.lease.close()
    names = {"config.yaml", "config.2.yaml", "config.3.yaml", "checkpoints", "status.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
