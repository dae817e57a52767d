"""What a run writes about itself survives crashes."""

import os
from pathlib import Path

import pytest

from mamba_fsdp.errors import LostError, UserError
from mamba_fsdp.run import records
from mamba_fsdp.trainer.run_folder import RunFolder


def test_going_on_drops_what_the_interrupted_run_wrote_later(tmp_path):
    metrics = records.Log(tmp_path / "metrics.jsonl", 0)
    for step in range(1, 6):
        metrics.write({"step": step, "loss": 1.0 if step > 1 else float("nan")})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')  # the crash
    again = records.Log(tmp_path / "metrics.jsonl", 3)
    again.write({"step": 4, "loss": 2.0})
    assert [
        (entry["step"], entry["loss"]) for entry in records.read(tmp_path / "metrics.jsonl")
    ] == [(1, None), (2, 1), (3, 1), (4, 2)]


def test_a_log_that_is_cut_short_while_the_run_lives_is_never_made_longer(tmp_path, capsys):
    """By logrotate's copytruncate, say. What is no entry is passed over with a word, also by the next start."""
    path = tmp_path / "metrics.jsonl"
    metrics = records.Log(path, 0)
    metrics.write({"step": 1}, {"step": 2})
    os.truncate(path, 0)
    metrics.write({"step": 3}, {"step": 4})
    os.truncate(path, path.stat().st_size - 3)
    metrics.write({"step": 5}, {"step": 6})
    assert b"\0" not in path.read_bytes()
    assert [entry["step"] for entry in records.read(path)] == [3, 6]
    assert (
        capsys.readouterr().err.count("metrics.jsonl: line 2 is not an entry of a run; such") == 1
    )
    records.Log(path, 3).write({"step": 4})
    assert [entry["step"] for entry in records.read(path)] == [3, 4]


def test_a_run_that_stood_still_after_its_check_cuts_nothing_from_the_others_log(tmp_path):
    path = tmp_path / "metrics.jsonl"
    checks = []

    def check(trying):
        checks.append(trying)
        if len(checks) == 3:
            path.write_text('{"step": 1}\n{"step": 2}\n')
        elif len(checks) > 3:
            raise LostError("another's")

    metrics = records.Log(path, 0, check)
    metrics.write({"step": 1})
    with pytest.raises(LostError):
        metrics.write({"step": 9})
    assert [entry["step"] for entry in records.read(path)] == [1, 2]


def test_an_event_that_a_crash_cut_short_costs_no_other(tmp_path):
    assert records.read_events(tmp_path) == []
    records.add_event(tmp_path, "started", 0, ranks=2)
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event": "che')  # the crash
    records.add_event(tmp_path, "failed", 3, reason="a crash")
    found = [(event["event"], event["step"]) for event in records.read_events(tmp_path)]
    assert found == [("started", 0), ("failed", 3)]


def test_a_full_disk_is_said_in_a_line(tmp_path, monkeypatch, capsys):
    """What was to be written waits in memory. Where the status of a failure can't be written, what failed first is what
    is told."""
    metrics = records.Log(tmp_path / "metrics.jsonl", 0)
    metrics.path = Path("/dev/full")
    metrics.write({"step": 1})
    with pytest.raises(UserError, match="/dev/full: can't be written .*No space left"):
        metrics.sync()
    assert capsys.readouterr().err.count("No space left") == 1
    metrics.path = tmp_path / "metrics.jsonl"
    metrics.write({"step": 2})
    assert [entry["step"] for entry in records.read(metrics.path)] == [1, 2]
    monkeypatch.setattr("mamba_fsdp.run.lease.Lease.is_held", lambda self: True)
    RunFolder(tmp_path / "missing").write_failure(0, UserError("what failed first"))
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    records.add_event(tmp_path, "checkpoint", 1)  # no reason to end a run
