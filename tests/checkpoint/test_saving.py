"""Tests Checkpointer.save: the files of a checkpoint, the time at which they are copied and committed, and errors of
the storage."""

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
    assume_verified,
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


def test_a_checkpoint_can_be_found_only_after_its_commit(run):
    """A checkpoint can be found only after its commit.

    The commit is then reported and recorded as an event, and no temporary files remain.
    """
    reports = []
    checkpointer = open_run(run, report=lambda text: reports.append((text, list_names(run))))
    assert newest(run) is None and checkpointer.save_phase() is None
    checkpointer.save(3, shards_of(3), {"step": 3})
    assert checkpointer.save_phase() == (3, Phase.WRITING) and not reports
    checkpointer.pending.work.result()
    assert not checkpointer.is_writing() and not list_names(run)
    checkpointer.poll()
    assert checkpointer.save_phase() == (3, Phase.COMMITTING)
    checkpointer.wait()
    assert reports == [("checkpoint step_00000003 is committed", ["step_00000003"])]
    assert checkpointer.last == newest(run)
    assert read_contents(checkpointer.last).state == {"step": 3}
    (event,) = read_events(run)
    assert event["step"] == 3 and event["bytes"] > 400 and event["seconds"] > 0
    assert 0 < checkpointer.stall_seconds() < 60 and checkpointer.stall_seconds() == 0
    checkpointer.save(3, shards_of(3), {"step": 3})
    assert checkpointer.save_phase() is None  # the checkpoint of step 3 is already committed


def test_other_programs_can_read_the_files(run):
    """The file that a rank writes is a standard safetensors file. Its tensors are named <tensor>@<start>."""
    from safetensors.torch import load_file

    path = make_checkpoints(run, [1]).last / "rank_00000.safetensors"
    content = load_file(path)
    # The length of the header is a multiple of 8. The data after it is therefore aligned.
    assert path.read_bytes()[0] % 8 == 0
    assert content.keys() == {"model/a.weight@0", "model/b@0"}
    assert torch.equal(content["model/a.weight@0"], ONES)


def test_an_asynchronous_save_holds_the_moment_of_the_call(run, monkeypatch):
    """An asynchronous save is not affected by changes of the state after save() returns, or by changes of the weights
    after wait_for_copies() returns, even if writing is retried.

    All saves copy the weights to the same buffer.
    """
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
    saved = assume_verified(checkpointer.last)
    load(saved, target, WORLD)
    assert saved.contents.state == {"list": [1]} and torch.equal(target[0].data, ONES)


def test_on_a_gpu_a_separate_stream_copies_the_weights(run, monkeypatch):
    """On a GPU, a separate CUDA stream copies the weights after all work that training has launched, and training waits
    for the copies.

    All saves copy to one buffer of minimal size, which stays pinned until the Checkpointer is closed.
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
    whole_blocks = 448 + 64  # bytes; each tensor begins at a multiple of 64
    cuda.cudart().cudaHostRegister.assert_called_once_with(mock.ANY, whole_blocks, 0)
    cuda.Stream().wait_stream.assert_called_once_with(cuda.current_stream())
    order = ["Stream().wait_stream", "stream().__enter__", "copy", "Event().record"]
    order += ["stream().__exit__", "Event().wait"]
    assert [name for name, _, _ in cuda.mock_calls if name in order] == order
    target = shards_of(0)
    load(assume_verified(checkpointer.last), target, WORLD)
    assert torch.equal(target[0].data, ONES)
    checkpointer.world = dataclasses.replace(checkpointer.world, size=2)
    with pytest.raises(KeyError), contextlib.closing(checkpointer):
        # With an error on one of several ranks, the device can be waiting for a rank that has ended. Unpinning the
        # buffer would then wait for the device.
        raise KeyError
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
    "call, disk, message",
    [
        ("fsync", garble, "step 1 could not be saved in .*: rank 0 .*data read back differs from"),
        ("replace", fill_up, "No space left"),
    ],
)
def test_a_save_that_the_disk_does_not_store_is_an_error_without_a_commit(
    run, monkeypatch, call, disk, message
):
    monkeypatch.setattr(os, call, disk)
    with pytest.raises(UserError, match=message):
        make_checkpoints(run, [1])
    assert list_names(run) == []


def test_weights_that_are_not_finite_are_never_committed(run):
    """A save of weights that are not finite is an error, and nothing is committed. Optimizer moments can be infinite,
    because they are not checked."""
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


FAILURES = []  # one element for each call of os.fsync in this process that will still fail


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
    """Saves once while the storage of rank 1 has three transient errors, once while every flush of rank 1 fails, and
    twice while the disk of rank 1 is full.

    Returns (the errors of the failed saves, the names in the checkpoints folder).
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
def test_a_storage_error_on_one_rank_is_retried_or_raised_on_all_ranks(run):
    """A transient storage error on one rank is retried, and the save succeeds.

    A permanent error or a full disk on one rank raises an error on every rank at the same step. The message contains
    the rank, the file and the reason, and no partial files remain.
    """
    for errors, names in run_ranks(2, suffer, run):
        assert names == ["step_00000001"]
        for error in errors:
            assert "step 2 " in str(error) and "rank 1 on " in str(error)
        assert "rank_00001.safetensors: Input/output error" in str(errors[0])
        assert "File too large" in str(errors[1]) and "File too large" in str(errors[2])
        assert [error.exit_code for error in errors] == [74, 2, 2]
    assert not problems(run / "checkpoints/step_00000001")
