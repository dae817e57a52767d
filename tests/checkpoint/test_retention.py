"""Which checkpoints stay: the newest, those kept for ever, those that another process reads."""

import multiprocessing
import os
import re
import shutil
import signal

import pytest

from mamba_fsdp import lease
from mamba_fsdp.checkpoint import retention
from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.restore import find_checkpoint
from mamba_fsdp.checkpoint.retention import held, hold_until_the_end, new_folder
from mamba_fsdp.errors import UserError
from tests.support.checkpoints import WORLD, make_checkpoints, problems, quiet, shards_of, steps_in


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Who lives shows it soon."""
    monkeypatch.setattr(lease, "SECONDS_BETWEEN_RENEWALS", 0.02)
    monkeypatch.setattr(lease, "SECONDS_BETWEEN_LOOKS", 0.02)


def test_the_newest_stay_and_the_first_at_or_after_each_multiple(run):
    """Where keep_every is a multiple of the interval, and where it is not; also when a later start keeps others."""
    make_checkpoints(run, range(3, 40, 3), keep=1, keep_every=10)
    assert steps_in(run) == [12, 21, 30, 39]
    make_checkpoints(run, [42, 45], keep=2)
    assert steps_in(run) == [12, 21, 30, 42, 45]
    shutil.rmtree(run)
    make_checkpoints(run, range(5, 26, 5), keep=1, keep_every=10)
    assert steps_in(run) == [10, 20, 25]


def test_of_a_link_to_a_checkpoint_only_the_link_is_removed(run, tmp_path):
    """Pruned, or left by a killed save: what it leads to may be another run's."""
    other = make_checkpoints(tmp_path / "other", [1]).last
    (run / "checkpoints").mkdir(parents=True)
    left = run / "checkpoints/.step_00000002.0123456789ab.partial"
    left.mkdir()
    for link in (run / "checkpoints/step_00000001", left / "step_00000002"):
        link.symlink_to(other)
    make_checkpoints(run, [3], keep=1)
    assert os.listdir(run / "checkpoints") == ["step_00000003"] and not problems(other)


def test_a_kept_one_that_is_broken_is_made_up_for(run):
    """The next whole checkpoint of its part stays in its place."""
    make_checkpoints(run, [9, 10, 11], keep=5, keep_every=10)
    for step in (10, 11):
        (run / f"checkpoints/step_000000{step}/state.json").unlink()
    checkpointer = Checkpointer(run, WORLD, keep=1, keep_every=10, report=quiet)
    checkpointer.resume(shards_of(0))
    for step in (12, 20, 30):
        checkpointer.save(step, shards_of(step), {})
        checkpointer.wait()
    assert {12, 20, 30} <= set(steps_in(run))


def read_until_told(run, pipe):
    path = find_checkpoint(run, WORLD, report=quiet).path
    pipe.send(path.name)
    pipe.recv()
    pipe.send(problems(path))


@pytest.fixture
def reader(run):
    """reader() -> (process, pipe): another process that reads the run's newest checkpoint until it gets a word."""
    started = []

    def start():
        here, there = multiprocessing.Pipe()
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=read_until_told, args=(run, there))
        process.start()
        started.append(process)
        assert here.poll(300)
        return process, here

    yield start
    for process in started:
        process.kill()
        process.join()


def test_what_another_process_reads_stays_until_it_has_read_it(run, reader):
    make_checkpoints(run, [1])
    process, pipe = reader()
    assert pipe.recv() == "step_00000001"
    make_checkpoints(run, [2, 3], keep=1)
    assert steps_in(run) == [1, 3]
    pipe.send("go")
    assert pipe.recv() == []
    process.join()
    make_checkpoints(run, [4, 5], keep=1)
    assert steps_in(run) == [5]


def test_a_killed_reader_holds_nothing_up(run, reader, monkeypatch):
    """Its end is known on this machine; elsewhere it counts as dead when its lease is no longer renewed."""
    make_checkpoints(run, [1])
    process, _ = reader()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    make_checkpoints(run, [2], keep=1)
    assert steps_in(run) == [2]
    with held(run / "checkpoints/step_00000002"):
        (sign,) = (run / "checkpoints/step_00000002").glob(".reading.*")
        content = sign.read_text()
    sign.write_text(content.replace('"machine": "', '"machine": "other'))
    monkeypatch.setattr(lease, "SECONDS_OF_SILENCE", 0.1)
    make_checkpoints(run, [3], keep=1)
    assert steps_in(run) == [3]


def test_a_reader_that_comes_between_the_look_and_the_removal_is_seen(run, monkeypatch):
    checkpointer = make_checkpoints(run, [1, 2])
    real = retention.move

    def late(old, new):
        if old.name == "step_00000001":
            monkeypatch.setattr(retention, "move", real)
            hold_until_the_end(old)
        real(old, new)

    monkeypatch.setattr(retention, "move", late)
    own = checkpointer.retention.own_folder(9)
    checkpointer.retention.prune(run / "checkpoints/step_00000002", own, keep=1)
    assert steps_in(run) == [1, 2] and not problems(run / "checkpoints/step_00000001")


def test_leftovers_of_killed_saves_are_removed_and_said(run):
    """Only this program's: other hidden folders stay, and what a living process is writing."""
    names = [
        "checkpoints/.step_00000002.0123456789ab.partial",
        "pth/.step_00000001.0123456789ab.partial",
        "pth/.step_00000003.0123456789ab.partial",
        "checkpoints/.snapshot",
        "checkpoints/.step_mine.partial",
    ]
    for name in names:
        (run / name).mkdir(parents=True)
        (run / name / "part").write_bytes(bytes(3_000_000))
    said = []
    with held(run / names[2]):
        make_checkpoints(run, [], report=said.append)
    assert said == [
        f"cleaned    1 unfinished, left by killed processes, removed from {run / where}: 0.003 GB"
        for where in ("checkpoints", "pth")
    ]
    assert [name for name in names if (run / name).exists()] == names[2:]


def test_a_new_folder_is_whole_or_not_there(tmp_path, capsys):
    """What a killed process left of it is removed; what one that may live is writing stays."""
    out = tmp_path / "model"
    left = [tmp_path / f".model.{number:012x}.partial" for number in range(2)]
    for path in left:
        path.mkdir()
    with held(left[1]):
        (sign,) = left[1].glob(".reading.*")
        with pytest.raises(ZeroDivisionError), new_folder(out) as unfinished:
            (unfinished / "part").touch()
            raise ZeroDivisionError
    assert [path.exists() for path in left] == [False, True] and not out.exists()
    assert re.search("cleaned    1 unfinished", capsys.readouterr().err) and not sign.exists()
    with new_folder(out) as unfinished:
        (unfinished / "part").touch()
    assert os.listdir(out) == ["part"]
    with pytest.raises(UserError, match="can't write .*model: "), new_folder(out):
        pass
