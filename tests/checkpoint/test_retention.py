"""Tests which checkpoints of a run are kept, and which ones are removed to free disk space."""

import os
import shutil
from types import SimpleNamespace

import pytest

from mamba_fsdp.checkpoint.contents import read_contents
from mamba_fsdp.checkpoint.folder import Reader
from mamba_fsdp.checkpoint.restore import find_checkpoint, find_newest_checkpoint, load
from mamba_fsdp.errors import UserError
from tests.support.checkpoints import (
    WORLD,
    list_names,
    make_checkpoints,
    open_run,
    problems,
    shards_of,
    steps_in,
)
from tests.support.disk import Disk


def test_the_newest_checkpoints_and_the_first_after_each_multiple_are_kept(run):
    """The newest `keep` checkpoints and the first checkpoint at or after each multiple of keep_every are kept.

    This applies whether or not keep_every is a multiple of the save interval, and after a start with other settings.
    """
    make_checkpoints(run, range(3, 40, 3), keep=1, keep_every=10)
    assert steps_in(run) == [12, 21, 30, 39]
    make_checkpoints(run, [42, 45], keep=2)
    assert steps_in(run) == [12, 21, 30, 42, 45]
    shutil.rmtree(run)
    make_checkpoints(run, range(5, 26, 5), keep=1, keep_every=10)
    assert steps_in(run) == [10, 20, 25]


def test_only_a_link_to_a_checkpoint_is_removed_not_its_target(run, tmp_path):
    """If an old checkpoint, or a file that a killed save left, is a symbolic link, only the link is removed. Its target
    can belong to another run."""
    other = make_checkpoints(tmp_path / "other", [1]).last
    staging = open_run(run).lease.staging
    for link in (run / "checkpoints/step_00000001", staging / "step_00000002"):
        link.symlink_to(other)
    make_checkpoints(run, [3], keep=1)
    assert os.listdir(run / "checkpoints") == ["step_00000003"] and not problems(other)


def test_a_damaged_checkpoint_of_keep_every_is_replaced_by_the_next_one(run):
    """If the checkpoint that keep_every preserves is damaged, the next undamaged one after the same multiple is kept
    instead."""
    make_checkpoints(run, [9, 10, 11], keep=5, keep_every=10)
    for step in (10, 11):
        (run / f"checkpoints/step_000000{step}/state.json").unlink()
    checkpointer = open_run(run, keep=1, keep_every=10)
    checkpointer.resume(shards_of(0))
    for step in (12, 20, 30):
        checkpointer.save(step, shards_of(step), {})
        checkpointer.wait()
    assert {12, 20, 30} <= set(steps_in(run))


def test_an_old_checkpoint_that_can_t_be_removed_is_only_a_warning(run, monkeypatch):
    reports = []
    checkpointer = make_checkpoints(run, [1], keep=1, report=reports.append)
    Disk(monkeypatch, run).lose("step_00000001")
    checkpointer.save(2, shards_of(2), {})
    checkpointer.wait()
    assert steps_in(run) == [1, 2]
    (warning,) = [
        line for line in reports if line.startswith("warning: can't remove old checkpoints")
    ]
    assert "Input/output error" in warning


SIZE = 428  # bytes of tensors in each checkpoint


@pytest.fixture
def small_disk(run, monkeypatch):
    """Returns a function small_disk(room), which simulates a disk with space for `room` checkpoints."""

    def small_disk(room):
        def disk_usage(path):
            return SimpleNamespace(total=SIZE * room, free=SIZE * (room - len(steps_in(run))))

        monkeypatch.setattr(shutil, "disk_usage", disk_usage)

    return small_disk


@pytest.mark.parametrize("room, steps, early", [(4, [2, 3, 4], 0), (2, [3, 4], 2)])
def test_an_old_checkpoint_is_removed_if_a_new_one_needs_its_space(
    run, small_disk, room, steps, early
):
    """If the disk has too little space for a new checkpoint, old ones are removed before it is written, and each such
    removal is reported."""
    small_disk(room)
    reports = []
    make_checkpoints(run, [1, 2, 3, 4], report=reports.append)
    assert steps_in(run) == steps
    assert sum("is removed to make room for" in line for line in reports) == early


def test_the_newest_checkpoint_is_never_removed_to_free_space(run, small_disk):
    """The newest checkpoint is never removed to free space. If the space is still too small, an error is raised and
    nothing is written."""
    small_disk(1)
    checkpointer = make_checkpoints(run, [1])
    for ask in (checkpointer.reserve_space, lambda shards: checkpointer.save(2, shards, {})):
        with pytest.raises(UserError, match="has only 0 B free, but .* 1 x 428 B"):
            ask(shards_of(2))
    assert list_names(run) == ["step_00000001"]


def test_reading_a_checkpoint_that_its_run_removes_is_an_error_of_one_line(run):
    """If a run removes a checkpoint while another process verifies it, or reads its metadata or tensors, the error has
    one line and says that the checkpoint is gone.

    If the user gave the run folder instead of a checkpoint, the newest checkpoint is loaded.
    """
    path = make_checkpoints(run, [1]).last
    found = find_newest_checkpoint(run, pytest.fail)
    choice = find_checkpoint(path, WORLD)
    reader = Reader(path, choice.contents)
    make_checkpoints(run, [2], keep=1)
    reads = (
        lambda: find_checkpoint(path, WORLD, found=found),
        lambda: read_contents(path),
        lambda: reader.read("model/b", 0, 7),
        lambda: load(choice, shards_of(0), WORLD),
    )
    for read in reads:
        with pytest.raises(UserError, match="step_00000001 is gone: its run has newer") as error:
            read()
        assert "\n" not in str(error.value)
    newest = find_checkpoint(run, WORLD, report=pytest.fail, found=found)
    assert newest.path.name == "step_00000002" and newest.broken == []
