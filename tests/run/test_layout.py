"""What lies in a run folder, and which of its checkpoints count."""

import re

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.run import layout, names


def test_a_step_is_read_back_from_its_name():
    for step in (0, 7, 12345678, 123456789):
        assert layout.step_of(layout.step_name(step)) == step
    for name in "step_ .step_00000001.0123.partial step_1a xstep_00000001".split():
        assert layout.step_of(name) is None


IS = "is not a run folder (it holds"


@pytest.mark.parametrize(
    "files, refused",
    {
        "index.json 00000.bin 00000.doc": f"{IS} 00000.bin, 00000.doc, index.json); ",
        "train/index.json dataset.json": f"{IS} dataset.json, train)",
        "a b c d e": f"{IS} a, b, c, d)",
        "thesis.tex": f"{IS} thesis.tex)",
        "thesis.tex checkpoints/step_00000001/COMMIT": "",
        "thesis.tex status.json": "",
        "config.yaml train.log slurm-17.out .nfs0001 starts/17.0/x": "",
        "": "",
    }.items(),
)
def test_what_is_no_run_folder_is_not_made_one(tmp_path, files, refused):
    """The launcher and a log may have been there before the run."""
    for file in files.split():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    if refused:
        with pytest.raises(UserError, match=re.escape(refused)):
            layout.check_is_run_folder(tmp_path)
    else:
        layout.check_is_run_folder(tmp_path)
    layout.check_is_run_folder(tmp_path / "nowhere")


def test_checkpoints_count_once_they_are_committed_and_in_the_order_of_their_steps(tmp_path):
    folders = "step_00000010 step_100000000 step_00000009 .step_00000011.abc.partial other"
    for name in folders.split():
        (tmp_path / name).mkdir()
        (tmp_path / name / names.COMMIT).touch()
    (tmp_path / "step_00000012").mkdir()
    found = [path.name for path in layout.committed(tmp_path)]
    assert found == "step_00000009 step_00000010 step_100000000".split()
    (tmp_path / "run").mkdir()
    assert names.newest_checkpoint(str(tmp_path / "run")) == ""
    (tmp_path / "run" / names.CHECKPOINTS).symlink_to(tmp_path)
    assert names.newest_checkpoint(str(tmp_path / "run")) == found[-1]
