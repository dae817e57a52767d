"""Saving fails: training continues, says so everywhere, tries again later, and stops before it trains unsaved for long."""

import errno
import io
import os
import threading
import time

import pytest

from mamba_fsdp import storage
from mamba_fsdp.checkpoint import checkpointer, files
from mamba_fsdp.errors import UserError
from mamba_fsdp.report.records import read_events, read_status
from mamba_fsdp.run_layout import committed
from mamba_fsdp.train import loop, saver
from tests.support.checkpoints import problems

LONG = {
    "num_steps": 12,
    "eval_interval": 0,
    "validation_path": "none",
    "publish": "false",
    "async_checkpoint": "false",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The next attempt comes two steps after a failure, and no patience takes a minute."""
    monkeypatch.setattr(saver, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(storage, "SECONDS_OF_TRYING", 0.0)


@pytest.fixture
def failing(monkeypatch):
    """failing(times, number, then) -> [step of each save that was begun]: so many fail with this errno; `then` is
    called in each that fails."""

    def start(times, number=errno.ENOSPC, then=lambda: None):
        begun, real = [], checkpointer.write_pieces

        def write(path, *rest, **named):
            begun.append(int(path.parent.name.split(".")[1].removeprefix("step_")))
            if len(begun) > times:
                return real(path, *rest, **named)
            path.write_bytes(bytes(1000))
            then()
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(checkpointer, "write_pieces", write)
        return begun

    return start


@pytest.fixture
def wait_for_writing(monkeypatch):
    """wait_for_writing(when=...): before each step for which it holds, training waits until nothing is written: what a
    save came to is learnt in that step, however slowly threads and disks run."""

    def begin(when=lambda: True):
        def take(context, *rest, _take=loop.take_step, **named):
            while when() and context.checkpointer.is_writing():
                time.sleep(0.005)
            return _take(context, *rest, **named)

        monkeypatch.setattr(loop, "take_step", take)

    return begin


def last_weights(run):
    return [
        path.read_bytes()
        for path in sorted(committed(run / "checkpoints")[-1].glob("*.safetensors"))
    ]


@pytest.fixture(scope="module")
def without():
    """What runs without a failure leave: {settings: (metrics, weights)}."""
    return {}


@pytest.mark.parametrize(
    "number, asynchronous",
    [
        (errno.ENOSPC, "false"),
        pytest.param(errno.ENOSPC, "true", marks=pytest.mark.slow),
        (errno.EDQUOT, "false"),
        (errno.EROFS, "false"),
        (errno.EIO, "false"),
    ],
)
def test_training_continues_and_saves_when_it_can_again(
    train, tmp_path, metrics_of, failing, without, number, asynchronous, wait_for_writing
):
    settings = LONG | {
        "async_checkpoint": asynchronous,
        "num_steps": 24 if asynchronous == "true" else 12,
    }
    wait_for_writing()
    if asynchronous not in without:
        train(tmp_path / "well", **settings)
        without[asynchronous] = metrics_of(tmp_path / "well"), last_weights(tmp_path / "well")
    told = []

    def look():
        told.append(
            (
                read_status(tmp_path / "run"),
                [path.name for path in (tmp_path / "run").rglob(".*.partial")],
            )
        )

    begun = failing(3, number, look)
    said = train(tmp_path / "run", **settings)
    metrics, status = metrics_of(tmp_path / "run"), read_status(tmp_path / "run")
    assert begun[:4] == (
        [2, 6, 10, 14] if asynchronous == "true" else [2, 4, 6, 8]
    )  # learnt two steps later
    assert begun[-1] == settings["num_steps"]
    assert (
        [entry for entry in metrics if "loss" in entry],
        last_weights(tmp_path / "run"),
    ) == without[asynchronous]
    assert [entry["failed_saves"] for entry in metrics if "failed_saves" in entry] == [1, 2, 3, 0]
    warnings = [line for line in said.splitlines() if line.startswith("warning")]
    assert (
        len(warnings) == 3 and "2 of 5 in a row; the next attempt comes after step" in warnings[1]
    )
    assert all(
        "rank_00000.safetensors" in line and os.strerror(number) in line and "rank 0 on" in line
        for line in warnings
    )
    events = [event for event in read_events(tmp_path / "run") if event["event"] == "failed_save"]
    assert [event["in_a_row"] for event in events] == [1, 2, 3] and os.strerror(number) in events[
        0
    ]["reason"]
    assert "saving failed" not in told[0][0]["reason"] and all(
        len(partial) == 1 for _, partial in told
    )
    assert all(
        before["status"] == "running" and os.strerror(number) in before["reason"]
        for before, _ in told[1:]
    )
    assert status["status"] == "finished" and not list((tmp_path / "run").rglob(".*.partial"))


@pytest.mark.parametrize("number, code", [(errno.ENOSPC, 2), (errno.EIO, 74)])
def test_a_run_that_can_t_save_stops(train, tmp_path, failing, number, code):
    """With what was saved before, and an exit code with which the launcher queues it again only after what may pass."""
    train(tmp_path, **LONG | {"num_steps": 2})
    begun = failing(10**9, number)
    with pytest.raises(
        UserError, match="^3 saves in a row failed .max_failed_saves.*the last: .*step 8 could"
    ) as told:
        train(tmp_path, **LONG, max_failed_saves=3)
    assert begun == [4, 6, 8] and told.value.exit_code == code
    status = read_status(tmp_path)
    assert status["status"] == "failed" and "3 saves in a row failed" in status["reason"]
    assert [path.name for path in committed(tmp_path / "checkpoints")] == ["step_00000002"]


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_the_last_save_of_a_run_must_not_fail(train, tmp_path, failing, asynchronous):
    failing(1)
    with pytest.raises(
        UserError, match="^the checkpoint of step 12 could not be saved: .*No space left"
    ):
        train(tmp_path, **LONG | {"async_checkpoint": asynchronous}, checkpoint_interval=100)
    assert read_status(tmp_path)["status"] == "failed"
    train(tmp_path, **LONG)
    assert read_status(tmp_path)["status"] == "finished"


# A storage layer that lies and stalls


class Liar(io.FileIO):
    """Says that it has written what it has not, has written half of or something else; or reads other bytes."""

    how = ""

    def write(self, data):
        data = bytes(data)
        if self.how == "unwritten":
            self.seek(len(data), os.SEEK_CUR)
        else:
            lies = {"half": data[: len(data) // 2], "other": data[:-1] + bytes([data[-1] ^ 1])}
            super().write(lies.get(self.how, data))
        return len(data)

    def readinto(self, buffer):
        count = super().readinto(buffer)
        if count and self.how == "read":
            buffer[0] ^= 1
        return count


@pytest.mark.parametrize("how", ["unwritten", "half", "other", "read"])
def test_what_the_storage_pretends_to_have_written_is_never_committed(
    train, tmp_path, monkeypatch, how
):
    """The run learns of it while it saves, and saves again when the storage is honest."""

    def lying(path, mode="r", **_):
        file = Liar(path, mode.replace("b", ""))
        file.how = how if len(failed) < 2 else ""
        return io.BufferedWriter(file, 1 << 24) if "w" in mode else file

    def tell(self, step, in_a_row, *words, _tell=saver.MetricsLogger.save_failed):
        failed.append(words)
        _tell(self, step, in_a_row, *words)

    failed = []
    monkeypatch.setattr(saver.MetricsLogger, "save_failed", tell)
    monkeypatch.setattr(files, "open", lying, raising=False)
    train(tmp_path, **LONG, keep_checkpoints=9)
    assert len(failed) == 2
    assert all("what was read back is not what was written" in words[0] for words in failed)
    whole = committed(tmp_path / "checkpoints")
    assert [path.name[-2:] for path in whole] == ["06", "08", "10", "12"]
    assert not any(problems(path) for path in whole)


@pytest.mark.slow
def test_a_save_that_hangs_counts_as_failed_and_no_second_one_is_begun(
    train, tmp_path, monkeypatch
):
    """Training continues meanwhile; what hung is committed when it is written at last."""
    hangs, writing, most = threading.Event(), [], []
    real = checkpointer.write_pieces

    def write(path, *rest, **named):
        writing.append(path)
        most.append(len(writing))
        if len(most) == 2:
            monkeypatch.setattr(checkpointer, "SECONDS_OF_SILENCE", 0.5)
            hangs.wait(400)
        try:
            return real(path, *rest, **named)
        finally:
            writing.remove(path)

    def tell(self, step, in_a_row, *words, _tell=saver.MetricsLogger.save_failed):
        told.append((step, in_a_row))
        if in_a_row == 3:
            monkeypatch.setattr(checkpointer, "SECONDS_OF_SILENCE", 400)
            hangs.set()
        _tell(self, step, in_a_row, *words)

    told = []
    monkeypatch.setattr(checkpointer, "write_pieces", write)
    monkeypatch.setattr(saver.MetricsLogger, "save_failed", tell)
    said = train(tmp_path, **LONG | {"async_checkpoint": "true", "num_steps": 40})
    assert [number for _, number in told] == [1, 2, 3] and max(most) == 1
    assert "the checkpoint of step 4 is still being written: rank 0" in said
    assert (
        committed(tmp_path / "checkpoints")[-1].name == "step_00000040"
        and "step_00000004 is committed" in said
    )


# A file system that is full


def test_room_is_looked_for_before_the_first_step(train, tmp_path, monkeypatch):
    """Where not even one checkpoint fits it is an error."""
    free = [10**12]
    monkeypatch.setattr(
        checkpointer.shutil,
        "disk_usage",
        lambda path: checkpointer.shutil._ntuple_diskusage(10**12, 10**12 - free[0], free[0]),
    )
    train(tmp_path / "much", **LONG)
    needed = sum(
        path.stat().st_size
        for path in committed(tmp_path / "much/checkpoints")[-1].glob("*.safetensors")
    )
    free[0] = needed // 2
    with pytest.raises(UserError, match="a checkpoint needs .* GB, but .*checkpoints has only"):
        train(tmp_path / "none", **LONG)
    assert not (tmp_path / "none/metrics.jsonl").exists()
