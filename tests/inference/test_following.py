"""Tests mamba_fsdp.inference.following: `evaluate --follow` evaluates each checkpoint of a run once while the run
trains."""

import io
import shutil

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.inference import following
from mamba_fsdp.reporting.console import Console
from mamba_fsdp.run.layout import step_name
from mamba_fsdp.run.records import read_entries, write_status
from mamba_fsdp.verbs import evaluate


def commit(run, step, *marks):
    checkpoint = run / "checkpoints" / step_name(step)
    checkpoint.mkdir(parents=True)
    for mark in ("COMMIT", *marks):
        (checkpoint / mark).touch()


@pytest.fixture
def follow(tmp_path, monkeypatch):
    """Returns a function follow(method, {step: function to call during the evaluation of this step's checkpoint}),
    which follows the run in tmp_path and returns (the evaluated steps, the printed text)."""
    monkeypatch.setattr(following, "POLL_SECONDS", 0.0)

    def follow_here(way, happens):
        measured = []

        def measure(checkpoint):
            step = int(checkpoint.name.removeprefix("step_"))
            measured.append(step)
            happens.get(step, lambda: None)()
            return {"data/loss": float(step)}

        output = io.StringIO()
        following.follow(tmp_path, "data", way, measure, Console(stream=output))
        return measured, output.getvalue()

    return follow_here


def test_each_checkpoint_is_evaluated_once_until_the_run_is_finished(follow, tmp_path):
    """Each checkpoint is evaluated once, also if the command is interrupted and started again, until the run has
    finished.

    A checkpoint that the run removes during its evaluation is skipped. A broken checkpoint is an error.
    """

    def removes_one():
        shutil.rmtree(tmp_path / "checkpoints" / step_name(2))
        raise UserError("its file is gone")

    def fails():
        raise UserError("broken")

    write_status(tmp_path, "running", 0)
    for step in (1, 2, 3):
        commit(tmp_path, step)
    with pytest.raises(UserError, match="broken"):
        follow("a", {2: removes_one, 3: fails})
    measured, output = follow(
        "a", {3: lambda: commit(tmp_path, 4), 4: lambda: write_status(tmp_path, "finished", 4)}
    )
    over = (
        f"complete   {tmp_path} is finished; the results are in {tmp_path}/evaluations/data.jsonl\n"
    )
    assert measured == [3, 4]
    assert output == f"step 3: data/loss 3.0000\nstep 4: data/loss 4.0000\n{over}"
    assert follow("a", {}) == ([], over)
    assert follow("b", {})[0] == [1, 3, 4]
    lines = read_entries(tmp_path / "evaluations/data.jsonl")
    assert [line["step"] for line in lines] == [1, 3, 4] * 2
    assert lines[0]["evaluated"] == {"data/loss": 1.0}


def test_only_kept_checkpoints_and_the_last_one_are_evaluated(follow, tmp_path):
    for step, *marks in ((1,), (2, "KEEP"), (3,), (4, "KEEP"), (5,)):
        commit(tmp_path, step, *marks)
    write_status(tmp_path, "finished", 5)
    assert follow("a", {})[0] == [2, 4, 5]


def test_a_change_of_method_evaluates_again(in_user_folder, call, tmp_path):
    """A checkpoint is evaluated again if the path or content of the store changes, or an option that affects the
    results. Options that only affect the speed do not count."""
    stores = tmp_path / "x" / "y", tmp_path / "x_y"
    for store in stores:
        shutil.copytree(in_user_folder / "data/builtin/validation", store)
    run = shutil.copytree("runs/demo", tmp_path / "run")

    def measured(store, *options):
        code, output = call(
            evaluate, run, store, "--follow", "--limit=2", "--seq_length=32", *options
        )
        assert code == 0, output
        return "step 4: " in output

    assert measured(stores[0]) and not measured(stores[0], "--batch_size=1")
    assert measured(stores[1]) and measured(stores[0], "--reset_at_documents")
    shutil.rmtree(stores[0])
    shutil.copytree(in_user_folder / "data/builtin/train", stores[0])
    assert measured(stores[0]) and not measured(stores[0])
