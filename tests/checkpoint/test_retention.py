"""Which checkpoints stay: the newest, those kept for ever, those that another process reads."""

import multiprocessing
import os
import re
import shutil
import signal
import time

import pytest
import torch

from mamba_fsdp.checkpoint import retention
from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.folder import Reader, find_checkpoint, problems
from mamba_fsdp.checkpoint.retention import held, until_the_end
from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World

WORLD = World.alone()


def make(run, steps, **how):
    checkpointer = Checkpointer(run, WORLD, report=how.pop("report", lambda text: None), **how)
    for step in steps:
        checkpointer.save(
            step, [Shard("a", (10,), 0, torch.full((10,), float(step)))], {"step": step}
        )
        checkpointer.wait()
    return checkpointer


def steps_in(run):
    return [
        int(name[5:])
        for name in sorted(os.listdir(run / "checkpoints"))
        if name.startswith("step_")
    ]


@pytest.fixture(autouse=True)
def nothing_held():
    yield
    until_the_end.close()


def test_the_first_at_or_after_each_multiple_stays_for_ever(run):
    """Where keep_every is a multiple of the interval, and where it is not; also when a later start keeps others."""
    make(run, range(3, 40, 3), keep=1, keep_every=10)
    assert steps_in(run) == [12, 21, 30, 39]
    make(run, [42, 45], keep=2, keep_every=0)
    assert steps_in(run) == [12, 21, 30, 42, 45]
    shutil.rmtree(run)
    make(run, range(5, 26, 5), keep=1, keep_every=10)
    assert steps_in(run) == [10, 20, 25]


def test_of_a_link_to_a_checkpoint_only_the_link_is_removed(run, tmp_path):
    """Pruned, or left by a killed save: what it leads to may be another run's."""
    make(tmp_path / "other", [1])
    other = tmp_path / "other/checkpoints/step_00000001"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("step_00000001", ".step_00000002.0123456789ab.partial"):
        (run / "checkpoints" / name).symlink_to(other)
    make(run, [3], keep=1)
    assert os.listdir(run / "checkpoints") == ["step_00000003"]
    assert problems(other, WORLD) == []


def test_a_kept_one_that_is_broken_is_made_up_for(run):
    """The next whole checkpoint of its part stays in its place."""
    make(run, [10, 11], keep=5, keep_every=10)
    (run / "checkpoints/step_00000010/state.json").unlink()
    (run / "checkpoints/step_00000011/state.json").unlink()
    with pytest.raises(UserError):
        Checkpointer(run, WORLD, report=lambda text: None).newest()
    checkpointer = Checkpointer(run, WORLD, keep=1, keep_every=10, report=lambda text: None)
    checkpointer.retention.broken = {"step_00000010", "step_00000011"}
    for step in (12, 20, 30):
        checkpointer.save(step, [Shard("a", (1,), 0, torch.ones(1))], {})
        checkpointer.wait()
    assert {12, 20, 30} <= set(steps_in(run))


def read_until_told(run, pipe):
    path = find_checkpoint(run, World.alone(), report=lambda text: None)
    pipe.send(path.name)
    pipe.recv()
    pipe.send(problems(path, World.alone()))


@pytest.fixture
def reader(run):
    """reader() -> (process, pipe): another process that reads the run's newest checkpoint until it gets a word."""
    started = []

    def start():
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(
            target=read_until_told, args=(run, there)
        )
        process.start()
        started.append(process)
        assert here.poll(300)
        return process, here

    yield start
    for process in started:
        process.kill()
        process.join()


def test_what_another_process_reads_stays_until_it_has_read_it(run, reader):
    checkpointer = make(run, [1], keep=1)
    process, pipe = reader()
    assert pipe.recv() == "step_00000001"
    for step in (2, 3):
        checkpointer.save(step, [Shard("a", (10,), 0, torch.ones(10))], {})
        checkpointer.wait()
    assert steps_in(run) == [1, 3]
    pipe.send("go")
    assert pipe.recv() == []
    process.join()
    make(run, [4], keep=1)
    assert steps_in(run) in (
        [4],
        [1, 4],
    )  # forked children leave without atexit; then its end is known all the same
    make(run, [5], keep=1)
    assert steps_in(run) == [5]


def of_ended_process(sign):
    return re.sub('"started": .*?,', '"started": 1,', sign)


def test_a_killed_reader_holds_nothing_up(run, reader, monkeypatch):
    """Its end is known on this machine; elsewhere it counts as dead when its lease is no longer renewed."""
    checkpointer = make(run, [1], keep=1)
    process, pipe = reader()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    make(run, [2], keep=1)
    assert steps_in(run) == [2]
    with held(run / "checkpoints/step_00000002"):
        (sign,) = (run / "checkpoints/step_00000002").glob(".reading.*")
        content = sign.read_text()
    sign.write_text(of_ended_process(content))
    with held(run / "checkpoints/step_00000002"):
        assert not sign.exists()  # also where its checkpoint stays
    sign.write_text(content.replace('"machine": "', '"machine": "other'))
    checkpointer = make(run, [3], keep=1)
    assert steps_in(run) == [2, 3]
    monkeypatch.setattr(retention, "SECONDS_OF_SILENCE", 0.0)
    checkpointer.retention.prune(run / "checkpoints/step_00000003")
    assert steps_in(run) == [3]


def test_a_reader_that_comes_between_the_look_and_the_removal_is_seen(run, monkeypatch):
    checkpointer = make(run, [1, 2], keep=5)
    checkpointer.retention.keep = 1
    real = retention.move

    def late(old, new):
        if old.name == "step_00000001":
            monkeypatch.setattr(retention, "move", real)
            until_the_end.enter_context(held(old))
        real(old, new)

    monkeypatch.setattr(retention, "move", late)
    checkpointer.retention.prune(run / "checkpoints/step_00000002")
    assert steps_in(run) == [1, 2] and not problems(run / "checkpoints/step_00000001", WORLD)


def test_a_reader_that_may_not_write_takes_a_newer_one_when_its_own_is_pruned(run, monkeypatch):
    """As in a folder that is mounted read-only: it can't be seen, and what it was verifying vanishes."""
    checkpointer = make(run, [1], keep=1)

    def refuse(self):
        raise OSError(30, "Read-only file system")

    def pruned_meanwhile(path, *rest):
        monkeypatch.setattr("mamba_fsdp.checkpoint.folder.problems", problems)
        checkpointer.save(2, [Shard("a", (10,), 0, torch.ones(10))], {"step": 2})
        checkpointer.wait()
        return problems(path, *rest)

    monkeypatch.setattr(retention.Lease, "try_take", refuse)
    monkeypatch.setattr("mamba_fsdp.checkpoint.folder.problems", pruned_meanwhile)
    said = []
    assert Reader(find_checkpoint(run, WORLD, report=said.append)).state == {"step": 2} and not said


def test_leftovers_of_killed_saves_are_removed_and_said(run, monkeypatch):
    """Only this program's: other hidden folders stay, and what a living process is writing."""
    make(run, [1])
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
        (sign,) = (run / names[2]).glob(".reading.*")
        elsewhere = sign.read_text().replace('"machine": "', '"machine": "other')
        make(run, [], report=said.append)
    assert said == [
        f"cleaned    1 unfinished, of killed processes, removed from {run / where}: 0.003 GB"
        for where in ("checkpoints", "pth")
    ]
    assert [name for name in names if (run / name).exists()] == names[2:]
    (run / names[2] / sign.name).write_text(elsewhere)  # of a process on another machine
    checkpointer = make(run, [4], report=said.append)
    assert (run / names[2]).exists() and len(said) == 3
    monkeypatch.setattr(retention, "SECONDS_OF_SILENCE", 0.0)
    for step in (5, 6):  # it has not renewed it since the start
        checkpointer.save(step, [Shard("a", (1,), 0, torch.ones(1))], {})
        checkpointer.wait()
    assert [line for line in said if "cleaned" in line][2:] == [
        said[0].replace("checkpoints", "pth")
    ]
    assert not (run / names[2]).exists()


def test_signs_are_renewed(run, monkeypatch):
    make(run, [1])
    monkeypatch.setattr("mamba_fsdp.lease.SECONDS_BETWEEN_RENEWALS", 0.01)
    with held(run / "checkpoints/step_00000001"):
        (sign,) = (run / "checkpoints/step_00000001").glob(".reading.*")
        os.utime(sign, (0, 0))
        deadline = time.monotonic() + 300
        while not sign.stat().st_mtime:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not sign.exists()
