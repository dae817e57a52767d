"""What a start keeps in the run folder, and for how long."""

from mamba_fsdp.launch.start_folder import StartFolder


def test_a_job_leaves_nothing_of_its_starts_that_were_killed(tmp_path, monkeypatch):
    """The folders of other jobs stay."""
    monkeypatch.setenv("MAMBA_FSDP_OLD_STOP", "")
    names = ["77.0", "77.1", "78.0", "here_77"]
    folders = {name: StartFolder(str(tmp_path / "run.2"), name) for name in names}
    for folder in folders.values():
        folder.make({})
    folders["77.1"].remove()
    starts = tmp_path / "run.2" / "starts"
    assert {path.name for path in starts.iterdir()} == {"78.0", "here_77"}
    folders["here_77"].remove()
    folders["78.0"].remove()
    assert not starts.exists()
