"""Tests that any single failure of a system call has no effect, because storage operations are retried."""

import shutil
from types import SimpleNamespace

import pytest

from mamba_fsdp.checkpoint.restore import find_checkpoint
from mamba_fsdp.data.tokenizer import train
from mamba_fsdp.interop.places import find_origin
from mamba_fsdp.settings.resolve import check_run_folder, resolve_settings
from mamba_fsdp.storage import retry
from mamba_fsdp.trainer.run_folder import RunFolder
from mamba_fsdp.trainer.stopping import StopRequest
from tests.support.checkpoints import WORLD, make_checkpoints, shards_of
from tests.support.disk import Disk


@pytest.fixture
def place(tmp_path):
    return tmp_path / "disk"


@pytest.fixture
def withstand(place, monkeypatch):
    """Returns a function withstand(scenario, prepare), which asserts that the scenario returns the same result and
    leaves the same files whichever of its calls fails."""
    disk = Disk(monkeypatch, place)

    def list_files():
        return sorted(str(path.relative_to(place)) for path in place.rglob("*"))

    def check(scenario, prepare=lambda: None):
        def prepare_anew():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            return prepare()

        disk.check_single_failures(prepare_anew, scenario, list_files)

    return check


def test_a_run_folder_is_acquired_written_and_released(place, tmp_path, withstand):
    """Acquiring, writing and releasing a run folder leaves the newest tokenizer and no file of the lease, whichever
    call fails."""
    train(["aaa"], 257).save(tmp_path / "old")
    train(["bbb"], 257).save(tmp_path / "new")

    def scenario(_):
        folder = RunFolder(place)
        folder.acquire()
        for name in ("old", "new", "new"):
            folder.copy_tokenizer(SimpleNamespace(tokenizer_path=tmp_path / name))
        folder.lease.check()
        folder.write_status("finished", 1)
        folder.lease.close()
        copied = retry.read_bytes(place / "tokenizer/tokenizer.json")
        assert copied == (tmp_path / "new/tokenizer.json").read_bytes()

    withstand(scenario)


@pytest.mark.slow
def test_checkpoints_are_saved_kept_pruned_and_found(place, withstand):
    """Saving, pruning and finding checkpoints has the same results whichever call fails, including the checkpoints
    that keep_every preserves."""

    def prepare():
        return make_checkpoints(place, [6, 9], keep=1, keep_every=10, asynchronous=False)

    def scenario(checkpointer):
        checkpointer.reserve_space(shards_of(0))
        checkpointer.save(12, shards_of(12), {})
        checkpointer.lease.close()
        return find_checkpoint(place, WORLD, report=pytest.fail).path.name

    withstand(scenario, prepare)


@pytest.mark.parametrize("name", ["save_ckpt_path", "load_ckpt_path", "init_from"])
def test_the_origin_of_a_run_is_found(place, withstand, name):
    def prepare():
        make_checkpoints(place / "run", [3]).lease.close()

    def scenario(_):
        values = {"save_ckpt_path": str(place / "new"), name: str(place / "run")}
        settings = resolve_settings(values)
        check_run_folder(settings)
        return find_origin(settings.checkpoint)

    withstand(scenario, prepare)


def test_a_stop_file_is_removed(place, withstand):
    def scenario(_):
        with StopRequest(place, on_rank0=True) as stop:
            stop.reason = "STOP file"

    withstand(scenario, (place / "STOP").touch)
