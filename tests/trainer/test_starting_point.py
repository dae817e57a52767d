"""Tests the files that a start can find or lack: checkpoint, weights, data, and the run folder itself."""

import shutil
import tempfile

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.run.records import read_status
from mamba_fsdp.trainer.run_folder import RunFolder


def test_load_ckpt_path_may_be_the_run_folder(train, tmp_path, monkeypatch):
    """Many launchers pass it this way, also with resuming_dataset: the run resumes if there is a checkpoint,
    otherwise it starts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("run")
    given = {"load_ckpt_path": f"../{tmp_path.name}/link/", "resuming_dataset": True}
    assert "steps " in train("run", dry_run=True, **given) and not (tmp_path / "run").exists()
    assert "starting   from random weights" in train("run", num_steps=1, **given)
    said = train("run", num_steps=2, **given)
    assert "resumes    from run/checkpoints/step_00000001, step 1\n" in said
    assert "starting" not in said


@pytest.mark.parametrize("setting", [None, "init_from"])
def test_a_start_that_waited_for_another_of_its_run_goes_on_from_there(
    train, tmp_path, monkeypatch, setting
):
    """The second of two simultaneous starts finds no checkpoint, waits until the first one has trained to its end,
    and then resumes."""
    train(tmp_path / "first", num_steps=2)

    def acquire(folder, real=RunFolder.acquire):
        shutil.copytree(tmp_path / "first/checkpoints", folder.path / "checkpoints")
        real(folder)

    monkeypatch.setattr(RunFolder, "acquire", acquire)
    origin = {setting: tmp_path / "first"} if setting else {}
    said = train(tmp_path / "run", num_steps=2, **origin)
    assert "resumes    from " in said and "run/checkpoints/step_00000002, step 2" in said


def test_checkpoints_on_another_disk_than_the_run_are_refused(train, tmp_path):
    """Checkpoints could not be renamed into such a folder."""
    (tmp_path / "run").mkdir()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        (tmp_path / "run/checkpoints").symlink_to(other)
        with pytest.raises(UserError, match="checkpoints is on another disk"):
            train(tmp_path / "run", num_steps=1)


def empty(folder):
    """Empties a folder, like a program that cleans a scratch disk."""
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("setting", "remove"), [("init_from", shutil.rmtree), ("load_ckpt_path", empty)]
)
def test_what_a_run_began_with_may_be_gone(train, tmp_path, setting, remove):
    """The run's own checkpoint has priority.

    The model gets the shape stored there, and it is an error if the settings ask for another one.
    """
    train(tmp_path / "first", num_steps=1, expand=4)
    origin = tmp_path / "first"
    if setting == "init_from":
        origin = next((tmp_path / "first/pth").iterdir())
    with pytest.raises(UserError, match=rf"{origin}.* another model .*expand=1 \(there 4\); leave"):
        train(tmp_path / "run", num_steps=1, **{setting: origin}, expand=1)
    train(tmp_path / "run", num_steps=1, **{setting: origin})
    remove(origin)
    said = train(tmp_path / "run", num_steps=2, **{setting: origin})
    assert f"step_00000001, step 1; {origin} applied to its first start only" in said
    with pytest.raises(UserError, match=rf"{tmp_path}/run.* another model .*expand=1 \(there 4\)"):
        train(tmp_path / "run", num_steps=3, **{setting: origin}, expand=1)
    with pytest.raises(UserError, match=str(origin)):
        train(tmp_path / "other", num_steps=2, **{setting: origin})
    assert not (tmp_path / "other").exists()


@pytest.mark.torch22
def test_what_the_shape_of_the_weights_rules_out_is_refused(train, tmp_path):
    """The settings would be valid without the weights."""
    train(tmp_path / "gdn", num_steps=1, layers="gdn", headdim=8)
    with pytest.raises(UserError, match="context_parallel=2: Gated DeltaNet .* leave it at 1"):
        train(tmp_path / "run", init_from=tmp_path / "gdn", context_parallel=2)
    assert read_status(tmp_path / "run")["status"] == "failed"
