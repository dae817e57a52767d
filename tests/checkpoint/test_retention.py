"""Which checkpoints stay: the newest, and those kept for ever."""

import os
import shutil

import pytest

from mamba_fsdp.checkpoint import restore
from mamba_fsdp.checkpoint.contents import read_contents
from mamba_fsdp.checkpoint.folder import Reader
from mamba_fsdp.checkpoint.restore import find_checkpoint, load
from mamba_fsdp.errors import UserError
from mamba_fsdp.run import lease
from mamba_fsdp.run.lease import Lease, new_folder
from tests.support.checkpoints import (
    WORLD,
    make_checkpoints,
    open_run,
    problems,
    shards_of,
    steps_in,
)


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
    left = open_run(run).lease.own
    for link in (run / "checkpoints/step_00000001", left / "step_00000002"):
        link.symlink_to(other)
    make_checkpoints(run, [3], keep=1)
    assert os.listdir(run / "checkpoints") == ["step_00000003"] and not problems(other)


def test_a_kept_one_that_is_broken_is_made_up_for(run):
    """The next whole checkpoint of its part stays in its place."""
    make_checkpoints(run, [9, 10, 11], keep=5, keep_every=10)
    for step in (10, 11):
        (run / f"checkpoints/step_000000{step}/state.json").unlink()
    checkpointer = open_run(run, keep=1, keep_every=10)
    checkpointer.resume(shards_of(0))
    for step in (12, 20, 30):
        checkpointer.save(step, shards_of(step), {})
        checkpointer.wait()
    assert {12, 20, 30} <= set(steps_in(run))


@pytest.mark.parametrize("named", [True, False], ids=["a checkpoint", "a run"])
def test_a_reader_whose_checkpoint_is_removed_meanwhile_says_so_in_a_line(run, named):
    """Wherever it is by then: at the contents, or at the tensors."""
    path = make_checkpoints(run, [1]).last
    choice = find_checkpoint(path if named else run, WORLD)
    reader = Reader(path, read_contents(path))
    checkpointer = make_checkpoints(run, [2], keep=1)
    assert steps_in(run) == [2]
    reads = (lambda: reader.read("model/b", 0, 7), lambda: load(choice, shards_of(0), WORLD))
    for read in reads:
        with pytest.raises(UserError, match="step_00000001 is gone: its run has newer") as told:
            read()
        assert len(str(told.value).splitlines()) == 1
    assert not problems(checkpointer.last)


def test_a_reader_whose_checkpoint_is_removed_while_it_verifies(run, monkeypatch):
    """One that was named is gone; of a run the newest is taken."""
    path = make_checkpoints(run, [1]).last

    def removed_first(checkpoint, real=restore.read_commit):
        if checkpoint == path and path.exists():
            make_checkpoints(run, [2], keep=1)
        return real(checkpoint)

    monkeypatch.setattr(restore, "read_commit", removed_first)
    with pytest.raises(UserError, match="step_00000001 is gone"):
        find_checkpoint(path, WORLD)
    shutil.rmtree(run)
    make_checkpoints(run, [1])
    assert find_checkpoint(run, WORLD, report=pytest.fail).path.name == "step_00000002"


def test_what_a_killed_run_left_is_removed_and_said(run):
    """Only what lies in its own folder: other hidden folders stay."""
    killed = make_checkpoints(run, []).lease
    left = killed.own / "step_00000002"
    left.mkdir()
    (left / "part").write_bytes(bytes(3_000_000))
    (run / ".snapshot").mkdir()
    said = []
    make_checkpoints(run, [], report=said.append)
    assert said == [
        f"cleaned    3.0 MB, which a killed process left unfinished, removed from {run}"
    ]
    assert not killed.own.exists() and (run / ".snapshot").exists()


def test_a_new_folder_is_whole_or_not_there(tmp_path, capsys):
    """What a killed process left of it is removed; while one that lives writes it, no other does."""
    out = tmp_path / "model"
    killed = Lease(tmp_path / ".model.lease")
    killed.try_take()
    (killed.own / "part").write_bytes(bytes(3_000_000))
    with pytest.raises(UserError, match="model is in use by process"), new_folder(out):
        pass
    (tmp_path / ".model.lease").unlink()
    with pytest.raises(ZeroDivisionError), new_folder(out) as unfinished:
        (unfinished / "part").touch()
        raise ZeroDivisionError
    assert "cleaned    3.0 MB" in capsys.readouterr().err and os.listdir(tmp_path) == []
    with new_folder(out) as unfinished:
        (unfinished / "part").touch()
    assert os.listdir(out) == ["part"] and os.listdir(tmp_path) == ["model"]
    with pytest.raises(UserError, match="can't write .*model: "), new_folder(out):
        pass
