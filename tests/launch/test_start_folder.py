"""Tests mamba_fsdp.launch.start_folder: when the folders of starts are removed from the run folder."""

import subprocess

from mamba_fsdp.launch.start_folder import StartFolder, local_start_name


def test_folders_of_killed_starts_are_removed(tmp_path, monkeypatch):
    """The end of a start removes folders that earlier starts of the same job have left, or, outside Slurm, starts on
    the same machine whose process has ended. Other folders are kept."""
    monkeypatch.setenv("MAMBA_FSDP_OLD_STOP", "")
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = local_start_name()
    machine, _, _ = here.rpartition("_")
    killed = f"{machine}_{ended.pid}"
    elsewhere = f"here_0_0_{ended.pid}"
    alive = f"{machine}_1"
    names = ["77.0", "77.1", "78.0", here, killed, elsewhere, alive]
    folders = {name: StartFolder(str(tmp_path / "run.2"), name) for name in names}
    for folder in folders.values():
        folder.make({})
    starts = tmp_path / "run.2" / "starts"
    folders["77.1"].remove()
    assert {path.name for path in starts.iterdir()} == {"78.0", here, killed, elsewhere, alive}
    folders[here].remove()
    assert {path.name for path in starts.iterdir()} == {"78.0", elsewhere, alive}
    for name in ["78.0", elsewhere, alive]:
        folders[name].remove()
    assert not starts.exists()
