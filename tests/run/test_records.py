"""Tests mamba_fsdp.run.records: the records of a run survive crashes, and the status of a crashed run is detected."""

import contextlib
import os
import re
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.run import records
from mamba_fsdp.run.lease import Holder, Lease
from mamba_fsdp.run.names import LEASE, STARTING_REASON
from tests.run.test_lease import write_foreign_lease
from tests.support.checkpoints import commit_empty


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def lease(tmp_path):
    """Acquires the lease of the folder, and releases it after the test."""
    with contextlib.closing(Lease(tmp_path / LEASE)) as lease:
        lease.acquire(print, "")
        yield lease


def steps_in(path):
    return [entry["step"] for entry in records.read_entries(path)]


def test_resuming_drops_what_the_interrupted_run_wrote_later(path, lease):
    """A resumed run removes later entries and incomplete lines from metrics.jsonl. A number that is not finite is
    written as null, because JSON does not have NaN."""
    metrics = records.Log(path, 0, lease)
    for step in range(1, 6):
        metrics.write({"step": step, "loss": 1.0 if step > 1 else float("nan")})
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')  # a crash interrupts the line
    again = records.Log(path, 3, lease)
    again.write({"step": 4, "loss": 2.0})
    losses = [(entry["step"], entry["loss"]) for entry in records.read_entries(path)]
    assert losses == [(1, None), (2, 1), (3, 1), (4, 2)]
    assert records.latest_values(path.parent) == {"step": 4, "loss": 2}


def test_a_log_that_is_cut_short_while_the_run_lives_is_never_made_longer(path, lease, capsys):
    """If another program truncates the log, such as logrotate with copytruncate, the next entry is appended at the new
    end. Invalid lines are skipped with a warning, also by the next start."""
    metrics = records.Log(path, 0, lease)
    metrics.write({"step": 1}, {"step": 2})
    os.truncate(path, 0)
    metrics.write({"step": 3}, {"step": 4})
    os.truncate(path, path.stat().st_size - 3)
    metrics.write({"step": 5}, {"step": 6})
    assert b"\0" not in path.read_bytes() and steps_in(path) == [3, 6]
    warnings = capsys.readouterr().err
    assert warnings.count("metrics.jsonl: line 2 is not an entry of a run; such") == 1
    records.Log(path, 3, lease).write({"step": 4})
    assert steps_in(path) == [3, 4]


def test_only_lines_with_a_step_that_can_be_are_entries(path):
    odd = ["[1]", "{}", '{"step": -1}', '{"step": 1.0}', '{"step": true}', f'{{"step": {2**63}}}']
    lines = ['{"step": 0}', *odd, f'{{"step": {2**63 - 1}}}']
    path.write_text("\n".join(lines) + "\n")
    assert steps_in(path) == [0, 2**63 - 1]
    assert records.read_entries(path.with_name("nowhere")) == []
    with pytest.raises(UserError, match="can't be read .Is a directory"):
        records.read_entries(path.parent)


def test_an_event_that_a_crash_cut_short_costs_no_other(tmp_path):
    assert records.read_events(tmp_path) == []
    records.add_event(tmp_path, "started", 0, ranks=2)
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event": "che')  # a crash interrupts the line
    records.add_event(tmp_path, "failed", 3, reason="a crash")
    first, second = records.read_events(tmp_path)
    assert (first["event"], first["step"], first["ranks"]) == ("started", 0, 2)
    assert (second["event"], second["step"], second["reason"]) == ("failed", 3, "a crash")


@pytest.mark.parametrize(
    "events, seconds",
    [
        ("", 0),
        ("started 10", 50 + 205 - 7),  # the run was killed at 205, the time of its last metrics
        ("started 10, checkpoint 20, stopped 30", 50 + 30 - 7),
        ("started 10, stopped 30, failed 90", 50 + 30 - 7),  # the last command did not start
        ("started 503", 50),  # the command that begins at 500 restarts its ranks
    ],
)
def test_pauses_between_commands_are_no_time_of_theirs(tmp_path, monkeypatch, events, seconds):
    began = {"seconds_to_start": 3, "seconds_of_earlier_commands": 50}
    for event, second in re.findall(r"(\w+) (\d+)", events):
        moment = datetime.fromtimestamp(int(second), timezone.utc)
        monkeypatch.setattr(records, "utc_timestamp", moment.isoformat)
        records.add_event(tmp_path, event, 0, **began)
    (tmp_path / "metrics.jsonl").touch()
    os.utime(tmp_path / "metrics.jsonl", (205, 205))
    assert records.command_seconds(tmp_path, until=500) == seconds


def test_a_full_disk_is_said_in_a_line_and_what_was_to_be_written_waits(path, lease, capsys):
    metrics = records.Log(path, 0, lease)
    metrics.path = Path("/dev/full")
    metrics.write({"step": 1})
    metrics.write({"step": 2})
    assert metrics.failing
    with pytest.raises(UserError, match="/dev/full: can't be written .*No space left"):
        metrics.sync()
    assert capsys.readouterr().err.count("No space left") == 1
    metrics.path = path
    metrics.write({"step": 3})
    assert steps_in(path) == [1, 2, 3] and not metrics.failing


@pytest.mark.parametrize("started, status, step", [(1, "failed", 7), (None, "running", 3)])
def test_a_run_that_could_not_write_its_end_is_not_called_running(tmp_path, started, status, step):
    """repair_status keeps the status `running` while the holder of the lease is alive, and otherwise writes `failed`,
    with the step of the newest checkpoint."""
    commit_empty(tmp_path, 7)
    records.write_status(tmp_path, "running", 3)
    holder = asdict(Holder.this_process())
    write_foreign_lease(tmp_path, **{**holder, "started": started or holder["started"]})
    repaired = records.repair_status(tmp_path)
    assert (repaired["status"], repaired["step"]) == (status, step)
    assert records.read_status(tmp_path)["reason"] == repaired["reason"]
    why = "ended without writing its status: it was killed, or the disk was full"
    assert (why in repaired["reason"]) == (status == "failed")
    events = [event["step"] for event in records.read_events(tmp_path)]
    assert events == ([7] if status == "failed" else [])


def test_a_run_that_was_killed_on_request_is_stopped(tmp_path):
    """repair_status with a reason writes `stopped` for a run that was killed before its first step, and `failed` for
    one that was killed later. A run that ended by itself keeps its own status."""
    records.write_status(tmp_path, "running", 0, STARTING_REASON)
    write_foreign_lease(tmp_path, **asdict(Holder.this_process()) | {"started": 1})
    records.repair_status(tmp_path, "ended at once, on request")
    status = records.read_status(tmp_path)
    assert (status["status"], status["reason"]) == ("stopped", "ended at once, on request")
    records.write_status(tmp_path, "running", 3)
    assert records.repair_status(tmp_path, "on request")["status"] == "failed"
    records.write_status(tmp_path, "finished", 3)
    assert records.repair_status(tmp_path, "on request")["status"] == "finished"


def test_a_folder_without_a_status_has_none(tmp_path):
    assert records.read_status(tmp_path) == {}
    (tmp_path / "status.json").write_text('{"sta')
    assert records.repair_status(tmp_path) == {}
