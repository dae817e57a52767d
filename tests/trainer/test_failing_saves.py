"""Tests failed saves: training continues, reports the failure, saves again later, and stops if too many saves in a
row fail."""

import errno
import os
import shutil
import time

import pytest

from mamba_fsdp.checkpoint import checkpointer
from mamba_fsdp.errors import UserError
from mamba_fsdp.run.layout import step_of
from mamba_fsdp.run.records import read_events, read_status
from mamba_fsdp.storage import retry
from mamba_fsdp.trainer import loop
from mamba_fsdp.trainer.clock import Clock
from tests.support.checkpoints import metrics_of, steps_in

LONG = {
    "num_steps": 12,
    "eval_interval": 0,
    "validation_path": "none",
    "publish": "false",
    "async_checkpoint": "false",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Makes the next saves after a failure come two, four and eight steps later. A storage operation that fails is not
    retried."""
    monkeypatch.setattr(Clock, "mean_seconds", lambda clock, step: 30.0)
    monkeypatch.setattr(retry, "RETRY_SECONDS", 0.0)


@pytest.fixture
def failing(monkeypatch):
    """Returns a function failing(times, number), which makes the next `times` saves fail with this errno. It returns a
    list to which each later save appends its step."""

    def start(times, number=errno.ENOSPC):
        begun, real = [], checkpointer.write_pieces

        def write(path, *rest, **named):
            begun.append(step_of(path.parent.name))
            if len(begun) > times:
                return real(path, *rest, **named)
            path.write_bytes(bytes(1000))
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(checkpointer, "write_pieces", write)
        return begun

    return start


@pytest.fixture
def wait_for_writing(monkeypatch):
    """Makes each step wait until no checkpoint is being written. The result of a save is then known in a fixed step,
    however slow threads and disks are."""

    def take(context, *rest, _take=loop.take_step, **named):
        while context.checkpointer.is_writing():
            time.sleep(0.005)
        return _take(context, *rest, **named)

    monkeypatch.setattr(loop, "take_step", take)


def test_training_continues_and_saves_when_it_can_again(train, tmp_path, failing):
    run = tmp_path / "run"
    settings = LONG | {"num_steps": 16}
    train(tmp_path / "well", **settings)
    begun = failing(3)
    printed = train(run, **settings)
    metrics = metrics_of(run)
    reason = os.strerror(errno.ENOSPC)
    assert begun[:4] == [2, 4, 8, 16]
    assert [entry for entry in metrics if "loss" in entry] == metrics_of(tmp_path / "well")
    assert [entry["failed_saves"] for entry in metrics if "failed_saves" in entry] == [1, 2, 3, 0]
    warnings = [line for line in printed.splitlines() if line.startswith("warning")]
    assert len(warnings) == 3 and "2 of 5 in a row; the next attempt comes after" in warnings[1]
    assert "rank_00000.safetensors" in warnings[0] and reason in warnings[0]
    events = [event for event in read_events(run) if event["event"] == "failed_save"]
    assert [event["in_a_row"] for event in events] == [1, 2, 3] and reason in events[0]["reason"]
    assert read_status(run)["status"] == "finished" and not list(run.rglob(".*.partial"))


@pytest.mark.parametrize(
    "asynchronous, most, begins", [("false", 3, [4, 6, 10]), ("true", 2, [4, 8])]
)
def test_a_run_that_can_t_save_stops(
    train, tmp_path, failing, wait_for_writing, asynchronous, most, begins
):
    """After max_failed_saves failed saves in a row, the run ends with an error and keeps its earlier checkpoints. The
    exit code tells the launcher whether the error is transient. If it is, the launcher queues the job again."""
    train(tmp_path, **LONG | {"num_steps": 2})
    begun = failing(10**9, errno.EIO)
    message = f"^{most} saves in a row failed .max_failed_saves.*the last error: .*step {begins[-1]} could"
    with pytest.raises(UserError, match=message) as error:
        train(tmp_path, **LONG | {"async_checkpoint": asynchronous}, max_failed_saves=most)
    assert begun == begins and error.value.exit_code == 74
    status = read_status(tmp_path)
    assert status["status"] == "failed" and "saves in a row failed" in status["reason"]
    assert steps_in(tmp_path) == [2]


def test_the_last_save_of_a_run_must_not_fail(train, tmp_path, failing):
    """If the last save of a run fails, the run fails, because no later save can replace it. The same command then
    finishes the run."""
    failing(1)
    settings = LONG | {"num_steps": 2, "async_checkpoint": "true", "checkpoint_interval": 100}
    message = "^the checkpoint of step 2 could not be saved in .*: .*No space left"
    with pytest.raises(UserError, match=message) as error:
        train(tmp_path, **settings)
    assert error.value.exit_code == 2 and read_status(tmp_path)["status"] == "failed"
    train(tmp_path, **settings)
    assert read_status(tmp_path)["status"] == "finished"


def test_disk_space_is_checked_before_the_first_step(train, tmp_path, monkeypatch):
    """If the disk has too little space for one checkpoint, the run ends with an error before the first step."""
    full = shutil._ntuple_diskusage(10**12, 10**12, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(UserError, match="has only 1.0 kB free, but"):
        train(tmp_path, **LONG)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_old_checkpoints_are_removed_if_the_model_needs_their_space(train, tmp_path, monkeypatch):
    """If the disk has too little space for the published model, old checkpoints are removed, but not more than
    needed."""
    settings = LONG | {"num_steps": 4, "checkpoint_interval": 1}
    train(tmp_path, **settings)

    def disk_usage(path):
        free = {3: 0, 2: 10**9}[len(steps_in(tmp_path))]
        return shutil._ntuple_diskusage(10**12, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    printed = train(tmp_path, **settings | {"publish": "true"})
    assert "step_00000002 is removed to make room for the model's files" in printed
    assert steps_in(tmp_path) == [3, 4] and (tmp_path / "pth/step_00000004").is_dir()
