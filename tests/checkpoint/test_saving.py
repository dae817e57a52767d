"""What a save leaves, when, and what happens where it fails."""

import contextlib
import dataclasses
import resource
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from mamba_fsdp.checkpoint import checkpointer as module
from mamba_fsdp.checkpoint import files
from mamba_fsdp.checkpoint.contents import read_contents
from mamba_fsdp.checkpoint.restore import load
from mamba_fsdp.errors import StorageError, UserError
from mamba_fsdp.run.records import read_events
from mamba_fsdp.storage import patience
from tests.support.checkpoints import (
    WORLD,
    as_whole,
    make_checkpoints,
    names_in,
    newest,
    open_run,
    problems,
    shards_of,
    steps_in,
)
from tests.support.ranks import build, run_ranks

pytestmark = pytest.mark.torch22


def test_a_checkpoint_is_there_when_it_is_committed_and_not_before(run):
    """Between save and the wait that commits nothing can be chosen; afterwards it can, nothing hidden is left, and it
    is told and noted."""
    said = []
    checkpointer = open_run(run, report=lambda text: said.append((text, names_in(run))))
    assert newest(run) is None
    checkpointer.save(3, shards_of(3), {"step": 3})
    assert checkpointer.stage() == (3, module.Phase.WRITING) and not said
    checkpointer.pending.work.result()
    assert not checkpointer.is_writing() and not names_in(run)
    checkpointer.settle()
    assert checkpointer.stage() == (3, module.Phase.COMMITTING)
    checkpointer.wait()
    assert said == [("checkpoint step_00000003 is committed", ["step_00000003"])]
    assert checkpointer.last == newest(run)
    assert read_contents(checkpointer.last).state == {"step": 3}
    (event,) = read_events(run)
    assert event["bytes"] > 400 and event["seconds"] > 0 and checkpointer.stall_seconds() > 0


def test_other_programs_can_read_the_files(run):
    """A rank's file is plain safetensors, with pieces named <tensor>@<start>."""
    from safetensors.torch import load_file

    content = load_file(make_checkpoints(run, [1]).last / "rank_00000.safetensors")
    assert content.keys() == {"model/a.weight@0", "model/b@0"}
    assert torch.equal(content["model/a.weight@0"], torch.full((100,), 1.0))


def test_an_asynchronous_save_holds_the_moment_of_the_call(run, monkeypatch):
    """What happens to the state after save() returns, and to the weights after wait_for_copies(), is not in it, also
    where writing is tried again; the copies of each save lie in the same memory."""
    checkpointer = make_checkpoints(run, [0])
    changed = threading.Event()
    flush = files._flush

    def fail_once(file):
        if not changed.is_set():
            changed.wait(60)
            raise OSError(5, "Input/output error")
        flush(file)

    monkeypatch.setattr(files, "_flush", fail_once)
    kept = checkpointer.buffer
    shards = shards_of(1)
    state = {"list": [1]}
    checkpointer.save(1, shards, state)
    state["list"].append(2)
    checkpointer.wait_for_copies()
    shards[0].data.fill_(9)
    changed.set()
    checkpointer.wait()
    assert len(kept) and checkpointer.buffer is kept
    target = shards_of(0)
    saved = as_whole(checkpointer.last)
    load(saved, target, WORLD)
    assert saved.contents.state == {"list": [1]}
    assert torch.equal(target[0].data, torch.full((100,), 1.0))


def test_on_a_gpu_a_stream_of_its_own_copies_and_the_device_waits(run, monkeypatch):
    """The copies begin after what training has asked for so far; no thread but the writing one waits for them. They go to
    one buffer, pinned at the start and no larger than it must be."""
    calls = []
    pinned = []
    copy = torch._foreach_copy_

    def note(what, result=None):
        calls.append((what, threading.current_thread() is threading.main_thread()))
        return result

    class Event:
        record = lambda self: note("record")  # noqa: E731
        wait = lambda self: note("wait")  # noqa: E731
        synchronize = lambda self: note("synchronize")  # noqa: E731

    class Stream:
        wait_stream = staticmethod(lambda other: note(f"after {other}"))

    def register(address, size, flags):
        pinned.append(size)
        return 0

    def aside(stream):
        note("aside")
        return contextlib.nullcontext()

    fakes = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda: "training",
        "set_device": id,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=register),
        "check_error": lambda error: note(f"error {error}"),
        "stream": aside,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda *both, non_blocking: note(non_blocking, copy(*both))
    )
    world = dataclasses.replace(WORLD, device=torch.device("cuda", 0))
    checkpointer = open_run(run, world)
    checkpointer.make_room(shards_of(0))
    assert pinned == [sum(-(-shard.data.nbytes // 64) * 64 for shard in shards_of(0))]
    calls.clear()
    checkpointer.save(1, shards_of(1), {})
    checkpointer.wait_for_copies()
    checkpointer.wait()
    in_training = [what for what, is_training in calls if is_training]
    assert in_training == ["after training", "aside", True, "record", "wait"]
    assert ("synchronize", False) in calls and len(pinned) == 1
    target = shards_of(0)
    load(as_whole(checkpointer.last), target, WORLD)
    assert torch.equal(target[0].data, torch.full((100,), 1.0))


@pytest.mark.parametrize("room, steps", [(4, [2, 3, 4]), (2, [3, 4]), (1, [1])])
def test_an_old_checkpoint_makes_room_for_a_newer_one(run, monkeypatch, room, steps):
    """With a word, but never the newest: where that is not enough nothing is written."""

    def disk_usage(path):
        there = 428 * len(steps_in(run))
        return shutil._ntuple_diskusage(428 * room, there, 428 * room - there)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    said = []
    stops = contextlib.nullcontext()
    if room == 1:
        stops = pytest.raises(UserError, match="checkpoints has only 0 B free, but .* 1 x 428 B")
    with stops:
        make_checkpoints(run, [1, 2, 3, 4], keep=3, report=said.append)
    assert names_in(run) == [f"step_0000000{step}" for step in steps]
    early = [line for line in said if "is removed to make room for a newer one" in line]
    assert len(early) == {4: 0, 2: 2, 1: 0}[room]


def overflow(world, run):
    """[(what every rank was told, what is left)] where rank 1's disk is full in mid-file: training waits, or does not."""
    shards = build(world, strategy="fsdp")[0].shards()
    found = []
    for asynchronous in (False, True):
        folder = run / str(asynchronous)
        checkpointer = open_run(folder, world, asynchronous=asynchronous)
        checkpointer.save(1, shards, {})
        checkpointer.wait()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
        with pytest.raises(UserError) as raised:
            checkpointer.save(2, shards, {})
            while True:
                if not world.all_reduce_sum(float(checkpointer.is_writing())):
                    checkpointer.settle()
                time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        found.append((str(raised.value), names_in(folder)))
    return found


@pytest.mark.slow
def test_a_full_disk_on_one_rank_is_loud_on_all(run):
    """Every rank raises at the same step, naming rank, file and reason; nothing half-written is left."""
    for found in run_ranks(2, overflow, run):
        for message, left in found:
            assert "step 2 " in message and "rank 1 on " in message and "File too large" in message
            assert left == ["step_00000001"]


def stumble(world, run):
    """Rank 1's storage fails three times in mid-file while it saves, and again while it loads; then for good. Returns
    (whether what was saved came back, what is said in the end, what is left)."""
    patience.LONGEST_PAUSE = 0.01
    shards = build(world, strategy="fsdp")[0].shards()
    saved = [shard.data.clone() for shard in shards]
    left = []

    def stumbling(real):
        def function(file, *rest):
            if world.rank == 1 and left and "rank_0" in str(file.name):
                left.pop()
                raise OSError(5, "Input/output error")
            return real(file, *rest)

        return function

    files._flush = stumbling(files._flush)
    files._hash_bytes = stumbling(files._hash_bytes)
    checkpointer = open_run(run, world)
    left[:] = range(3)
    checkpointer.save(1, shards, {})
    checkpointer.wait()
    for shard in shards:
        shard.data.zero_()
    left[:] = range(3)
    checkpointer.resume(shards)
    came_back = all(torch.equal(shard.data, was) for shard, was in zip(shards, saved))

    patience.SECONDS_OF_TRYING = 0.2
    left[:] = range(10**6)
    with pytest.raises(StorageError) as raised:
        checkpointer.save(2, shards, {})
        checkpointer.wait()
    left.clear()
    return came_back, str(raised.value), names_in(run)


@pytest.mark.slow
def test_storage_that_fails_for_a_moment_fails_nobody_and_for_good_is_told_on_all(run):
    for came_back, message, left in run_ranks(2, stumble, run):
        assert came_back and "step 2" in message and "rank 1" in message
        assert "rank_00001.safetensors: Input/output error" in message
        assert left == ["step_00000001"]
    assert not problems(run / "checkpoints/step_00000001")


def test_what_the_disk_garbles_is_noticed_while_saving(run, monkeypatch):
    """A file that reads back differently from what was written is never committed."""

    def garble(file):
        file.flush()
        with open(file.name, "r+b") as again:
            again.write(b"?")

    monkeypatch.setattr(files, "_flush", garble)
    with pytest.raises(UserError, match="rank 0 .*read back is not what was written"):
        make_checkpoints(run, [1])
    assert names_in(run) == []


def test_an_error_while_committing_is_loud_and_commits_nothing(run, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device", "COMMIT")

    monkeypatch.setattr(module, "write_atomically", fail)
    with pytest.raises(UserError, match="No space left"):
        make_checkpoints(run, [1])
    assert names_in(run) == []
