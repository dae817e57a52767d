"""Tests mamba_fsdp.run.layout: which folders are run folders, and which of their checkpoints are committed."""

import re

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.run import layout, names
from tests.support.corpora import write_files


def make(folder, *files):
    write_files(folder, dict.fromkeys(files, ""))


IS = "is not a run folder (it contains"


@pytest.mark.parametrize(
    "files, refused",
    {
        "index.json 00000.bin 00000.doc": f"{IS} 00000.bin, 00000.doc, index.json); ",
        "a b c d e": f"{IS} a, b, c, d)",
        "thesis.tex checkpoints/step_00000001/COMMIT": "",
        "thesis.tex status.json": "",
        "config.yaml train.log slurm-17.out .nfs0001 starts/17.0/x": "",
        "": "",
    }.items(),
)
def test_other_folders_are_not_used_as_run_folders(tmp_path, files, refused):
    """A folder with unknown files is refused as a run folder, unless a run has already written there. Files of the launcher and log files are accepted, because
    they can exist before the run."""
    make(tmp_path, *files.split())
    if refused:
        with pytest.raises(UserError, match=re.escape(refused)):
            layout.check_is_run_folder(tmp_path)
    else:
        layout.check_is_run_folder(tmp_path)
    layout.check_is_run_folder(tmp_path / "nowhere")


def test_checkpoints_count_once_they_are_committed_and_in_the_order_of_their_steps(tmp_path):
    """The library and the launcher find the same committed checkpoints, in the order of their steps."""
    assert layout.newest_step(tmp_path) == 0 and names.newest_checkpoint(str(tmp_path)) == ""
    steps = "step_00000009 step_00000010 step_100000000".split()
    for name in (*reversed(steps), ".step_00000011.abc.partial", "other"):
        make(tmp_path, f"checkpoints/{name}/{names.COMMIT}")
    make(tmp_path, "checkpoints/step_200000000/state.json")
    assert [path.name for path in layout.list_committed(tmp_path / "checkpoints")] == steps
    assert names.newest_checkpoint(str(tmp_path)) == steps[-1]
    assert layout.newest_step(tmp_path) == 100000000
    assert layout.list_committed(tmp_path / "checkpoints/other/COMMIT") == []


def test_a_folder_that_can_t_be_listed_is_not_an_empty_one(tmp_path):
    """A folder of checkpoints that can't be listed is an error. Only the launcher treats it like an empty one, because
    it tries again later."""
    (tmp_path / "checkpoints").symlink_to(tmp_path / "checkpoints")
    assert names.newest_checkpoint(str(tmp_path)) == ""
    with pytest.raises(OSError, match="Too many levels"):
        layout.newest_step(tmp_path)


def test_unfinished_checkpoints_are_listed(tmp_path):
    """Only the checkpoints in the staging folder of the lease count as unfinished."""
    saved = f".{names.LEASE}.0123456789ab.partial/step_00000002"
    make(tmp_path, f"{saved}/x", "checkpoints/step_00000001/x", ".other.0123.partial/step_00000003")
    assert layout.list_unfinished(tmp_path) == [tmp_path / saved]
