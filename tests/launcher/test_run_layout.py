"""The names in a run folder: one module has them, and the launcher, a shell script, agrees with it."""

import re

import pytest

from mamba_fsdp import run_layout
from mamba_fsdp.errors import UserError


def test_the_launcher_knows_the_run_folder_under_the_same_names(project):
    """Whatever 1.train.sbatch reads or writes below $run_folder."""
    script = (project / "1.train.sbatch").read_text()
    script += (project / "mamba_fsdp/launch/job.sh").read_text()
    there = set(re.findall(r'\$run_folder"?/([\w.*]+(?:/step_\*/\w+)?)', script))
    assert there == {
        f".{run_layout.STOP}",  # until it is whole
        run_layout.FAILURES,
        run_layout.PREFLIGHT,
        run_layout.PROFILE,
        run_layout.RESOLVED,
        run_layout.STATUS,
        run_layout.STOP,
        f"{run_layout.CHECKPOINTS}/step_*/{run_layout.COMMIT}",
    }


@pytest.mark.parametrize("step", [0, 7, 12345678, 123456789])
def test_a_step_is_read_back_from_its_name(step):
    assert run_layout.step_of(run_layout.step_name(step)) == step


@pytest.mark.parametrize(
    "name", ["step_", ".step_00000001.0123.partial", "step_1a", "xstep_00000001"]
)
def test_what_is_no_checkpoint_has_no_step(name):
    assert run_layout.step_of(name) is None


@pytest.mark.parametrize(
    "files, refused",
    [
        (
            ["index.json", "00000.bin", "00000.doc"],
            "is not a run folder (it holds 00000.bin, 00000.doc, index.json); ",
        ),
        (
            ["train/index.json", "dataset.json"],
            "is not a run folder (it holds dataset.json, train)",
        ),
        (["thesis.tex"], "is not a run folder (it holds thesis.tex)"),
        (["a", "b", "c", "d", "e"], "is not a run folder (it holds a, b, c, d)"),
        (["thesis.tex", "checkpoints/step_00000001/COMMIT"], ""),
        (["thesis.tex", "status.json"], ""),
        (["config.yaml", "train.log", "slurm-17.out", ".nfs0001", "failures/17.0/x"], ""),
        ([], ""),
    ],
)
def test_what_is_no_run_folder_is_not_made_one(tmp_path, files, refused):
    """The launcher and a log may have been there before the run."""
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    if refused:
        with pytest.raises(UserError, match=re.escape(refused)):
            run_layout.check_is_run_folder(tmp_path)
    else:
        run_layout.check_is_run_folder(tmp_path)
    run_layout.check_is_run_folder(tmp_path / "nowhere")


def test_checkpoints_count_once_they_are_committed_and_in_the_order_of_their_steps(tmp_path):
    for name in (
        "step_00000010",
        "step_100000000",
        "step_00000009",
        ".step_00000011.abc.partial",
        "other",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / run_layout.COMMIT).touch()
    (tmp_path / "step_00000012").mkdir()
    assert [path.name for path in run_layout.committed(tmp_path)] == [
        "step_00000009",
        "step_00000010",
        "step_100000000",
    ]
