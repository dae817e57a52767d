"""Tests the files of a save, when they are written, and its failures."""

import contextlib
import dataclasses
import errno
import os
import resource
import threading
from unittest import mock

import pytest
import torch

from mamba_fsdp.checkpoint.checkpointer import Phase
from mamba_fsdp.checkpoint.contents import read_contents
from mamba_fsdp.checkpoint.restore import load
from mamba_fsdp.errors import UserError
from mamba_fsdp.run.records import read_events
from mamba_fsdp.storage import retry
from tests.support.checkpoints import (
    WORLD,
    as_whole,
    list_names,
    make_checkpoints,
    newest,
    open_run,
    problems,
    shards_of,
)
from tests.support.ranks import build, run_ranks

pytestmark = pytest.mark.torch22
ONES = torch.full((100,), 1.0)


def error_of(number):
    return OSError(number, os.strerror(number))


def test_a_checkpoint_is_there_when_it_is_committed_and_not_before(run):
    """Before the commit, no checkpoint can be found.

    After it, the checkpoint can be found, it is reported and recorded as an event, and no temporary files are left.
    """
    said = []
    checkpointer = open_run(run, report=lambda text: said.append((text, list_names(run))))
    assert newest(run) is None and checkpointer.save_phase() is None
    checkpointer.save(3, shards_of(3), {"step": 3})
    assert checkpointer.save_phase() == (3, Phase.WRITING) and not said
    checkpointer.pending.work.result()
    assert not checkpointer.is_writing() and not list_names(run)
    checkpointer.poll()
    assert checkpointer.save_phase() == (3, Phase.COMMITTING)
    checkpointer.wait()
    assert said == [("checkpoint step_00000003 is committed", ["step_00000003"])]
    assert checkpointer.last == newest(run)
    assert read_contents(checkpointer.last).state == {"step": 3}
    (event,) = read_events(run)
    assert event["step"] == 3 and event["bytes"] > 400 and event["seconds"] > 0
    assert 0 < checkpointer.stall_seconds() < 60 and checkpointer.stall_seconds() == 0
    checkpointer.save(3, shards_of(3), {"step": 3})
    assert checkpointer.save_phase() is None  # it is committed already


def test_other_programs_can_read_the_files(run):
    """A rank's file is a normal safetensors file with pieces named <tensor>@<start>."""
    from safetensors.torch import load_file

    path = make_checkpoints(run, [1]).last / "rank_00000.safetensors"
    content = load_file(path)
    assert (
        path.read_bytes()[0] % 8 == 0
    )  # the length of the header is a multiple of 8, so that the data is aligned
    assert content.keys() == {"model/a.weight@0", "model/b@0"}
    assert torch.equal(content["model/a.weight@0"], ONES)


def test_an_asynchronous_save_holds_the_moment_of_the_call(run, monkeypatch):
    """The checkpoint does not contain changes of the state after save() returns, and changes of weights after
    wait_for_copies(), even if writing is retried. All saves copy to the same memory."""
    checkpointer = make_checkpoints(run, [0])
    changed = threading.Event()

    def fsync(descriptor, real=os.fsync):
        if not changed.is_set():
            changed.wait(60)
            raise error_of(errno.EIO)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
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
    assert saved.contents.state == {"list": [1]} and torch.equal(target[0].data, ONES)


def test_on_a_gpu_a_stream_of_its_own_copies_and_the_device_waits(run, monkeypatch):
    """The copies wait for all work that training has launched so far.

    They use one buffer of minimal size. It stays pinned from the start to the end.
    """
    cuda = mock.MagicMock()
    cuda.copy.side_effect = torch._foreach_copy_
    names = "Stream Event current_stream set_device cudart check_error stream synchronize"
    for name in names.split():
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch, "_foreach_copy_", cuda.copy)
    checkpointer = open_run(run, dataclasses.replace(WORLD, device=torch.device("cuda", 0)))
    checkpointer.reserve_space(shards_of(0))
    checkpointer.save(1, shards_of(1), {})
    checkpointer.wait_for_copies()
    checkpointer.wait()
    whole_blocks = 448 + 64  # each tensor begins at a multiple of 64
    cuda.cudart().cudaHostRegister.assert_called_once_with(mock.ANY, whole_blocks, 0)
    cuda.Stream().wait_stream.assert_called_once_with(cuda.current_stream())
    order = ["Stream().wait_stream", "stream().__enter__", "copy", "Event().record"]
    order += ["stream().__exit__", "Event().wait"]
    assert [name for name, _, _ in cuda.mock_calls if name in order] == order
    target = shards_of(0)
    load(as_whole(checkpointer.last), target, WORLD)
    assert torch.equal(target[0].data, ONES)
    checkpointer.world = dataclasses.replace(checkpointer.world, size=2)
    with pytest.raises(KeyError), contextlib.closing(checkpointer):
        raise KeyError  # an error on one of several ranks: the device can be waiting for a rank that has ended
    cuda.cudart().cudaHostUnregister.assert_not_called()
    for _ in range(2):
        checkpointer.close()
    cuda.cudart().cudaHostUnregister.assert_called_once_with(checkpointer.buffer.data_ptr())


def garble(descriptor):
    os.pwrite(descriptor, b"?", 0)


def fill_up(old, new, real=os.replace):
    if new.name == "COMMIT":
        raise error_of(errno.ENOSPC)
    real(old, new)


@pytest.mark.parametrize(
    "call, disk, words",
    [
        ("fsync", garble, "step 1 could not be saved in .*: rank 0 .*data read back differs from"),
        ("replace", fill_up, "No space left"),
    ],
)
def test_what_the_disk_does_not_hold_is_loud_and_never_committed(
    run, monkeypatch, call, disk, words
):
    monkeypatch.setattr(os, call, disk)
    with pytest.raises(UserError, match=words):
        make_checkpoints(run, [1])
    assert list_names(run) == []


def test_weights_that_are_not_finite_are_never_committed(run):
    """Moments are not checked, and can be infinite."""
    checkpointer = open_run(run)
    shards = shards_of(float("inf"))
    checkpointer.save(1, shards, {})
    with pytest.raises(UserError, match="model/a.weight is not finite: training has diverged"):
        checkpointer.wait()
    assert list_names(run) == []
    shards[0].name = "optimizer/a.weight/exp_avg"
    checkpointer.save(1, shards, {})
    checkpointer.wait()
    assert list_names(run) == ["step_00000001"]


FAILURES = []  # the errors that the storage of this process will raise


def stumble():
    if FAILURES:
        FAILURES.pop()
        raise error_of(errno.EIO)


def stumbling_fsync(descriptor, real=os.fsync):
    stumble()
    real(descriptor)


def refusal(checkpointer, shards):
    with pytest.raises(UserError) as raised:
        checkpointer.save(2, shards, {})
        checkpointer.wait()
    return raised.value


def suffer(world, run):
    """Saves while the storage of rank 1 has three transient errors, then permanent errors, and then a full disk.

    Returns (errors of the failed saves, remaining files).
    """
    os.fsync = stumbling_fsync
    retry.MAX_PAUSE = 0.01
    is_here = world.rank == 1
    shards = build(world, strategy="fsdp")[0].shards()
    checkpointer = open_run(run, world)
    FAILURES[:] = range(3 * is_here)
    checkpointer.save(1, shards, {})
    checkpointer.wait()

    retry.RETRY_SECONDS = 0.2
    FAILURES[:] = range(10**6 * is_here)
    errors = [refusal(checkpointer, shards)]
    FAILURES.clear()
    if is_here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
    for checkpointer.asynchronous in (False, True):
        errors.append(refusal(checkpointer, shards))
    return errors, list_names(run)


@pytest.mark.slow
def test_what_one_ranks_storage_does_is_withstood_or_loud_on_all(run):
    """A transient failure does not fail the save.

    A permanent failure or a full disk raises an error on every rank at the same step. It names the rank, the file and
    the reason, and no partial files are left.
    """
    for errors, left in run_ranks(2, suffer, run):
        assert left == ["step_00000001"]
        for error in errors:
            assert "step 2 " in str(error) and "rank 1 on " in str(error)
        assert "rank_00001.safetensors: Input/output error" in str(errors[0])
        assert "File too large" in str(errors[1]) and "File too large" in str(errors[2])
        assert [error.exit_code for error in errors] == [74, 2, 2]
    assert not problems(run / "checkpoints/step_00000001")
