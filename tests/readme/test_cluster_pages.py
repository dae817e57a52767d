"""Runs the commands of docs/cluster.md and docs/image.md on a simulated cluster and inside the image.

The replacements for Slurm and Pyxis (tests/support/pyxis.py) run everything on this machine. training.py and
get_dataset.py only record their arguments. tests/slurm trains on a real Slurm.
"""

import re
import shutil
import subprocess

import pytest

from tests.readme.pages import blocks_to_run, text_of
from tests.support import forked
from tests.support.projects import make_project, make_venv, shorten_corpus
from tests.support.pyxis import SQUASHFS, make_cluster

pytestmark = pytest.mark.slow
# This program replaces the Python of the image. It records its arguments, and fails outside of the project's folder.
PYTHON = """#!/bin/sh
echo "$@" >> {}
[ "$PWD" = {} ] || exit 1
"""


@pytest.fixture
def here(tmp_path, monkeypatch, project):
    """Makes the folder /fsx/me/mamba-train of the pages, a copy of the project with a .venv. A temporary folder
    replaces /fsx."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder = make_project(tmp_path / "fsx/me/mamba-train")
    shutil.copy(project / "0.create_env.sh", folder)
    make_venv(folder)
    shorten_corpus(folder)
    return folder


def script_of(block, here):
    """Returns the commands of a block as one script, in which a temporary folder replaces /fsx."""
    script = "\n".join(command.text for command in block)
    return script.replace("/fsx", str(here.parents[1]))


def run_script(script, here, cluster):
    """Runs a script in the project's folder, and returns its output."""
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=here,
        env=cluster.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def trainings(cluster):
    """Returns model, data and run folder of each training that srun would start, in order."""
    found = []
    for training in cluster.trainings():
        settings = training["settings"]
        data = settings["data"]["dataset_path"]
        found.append(
            (settings["model"]["model_name"], data, settings["checkpoint"]["save_ckpt_path"])
        )
    return found


def test_a_cluster_without_an_image_is_checked_and_trains(here, tmp_path):
    """The commands of docs/cluster.md check the nodes and start the trainings of the page. A smaller model replaces the
    large one, because preflight requires space for its checkpoints."""
    first, larger = blocks_to_run("docs/cluster.md")
    cluster = make_cluster(tmp_path / "cluster", here)
    output = run_script(script_of(first, here), here, cluster)
    assert output.startswith(".venv is complete: stack cpu\n")
    assert "\nready to train\n" in output
    assert (here / "data/builtin/train/index.json").exists()
    script = script_of(larger, here).replace("mamba-2.8b", "mamba-130m")
    run_script(script, here, cluster)
    assert trainings(cluster) == [
        ("demo", "data/builtin", "runs/demo"),
        ("mamba-130m", "data/builtin", f"{here.parents[1]}/runs/big"),
    ]


def test_a_cluster_with_the_image_is_checked_makes_tokens_and_trains(here, tmp_path):
    submit, _ = blocks_to_run("docs/image.md")
    fsx = here.parents[1]
    (fsx / "texts").mkdir()
    (fsx / "texts/a.jsonl").touch()
    (here / "mamba-train.sqsh").write_bytes(SQUASHFS)
    cluster = make_cluster(tmp_path / "cluster", here)
    output = run_script(script_of(submit, here), here, cluster)
    assert output.startswith("Train") and "\nready to train\n" in output
    made = (fsx / "data/mine/asked").read_text()
    assert made == f"{fsx}/texts/*.jsonl {fsx}/data/mine"
    assert trainings(cluster) == [
        ("demo", "data/builtin", "runs/demo"),
        ("demo", f"{fsx}/data/mine", f"{fsx}/runs/mine"),
    ]


def test_the_other_commands_run_inside_the_image(user_folder, here, tmp_path):
    """The commands of docs/image.md that use the image's Python also run on this machine. The simulated nodes have no
    GPUs, so the commands are changed as the page explains for this case."""
    _, inside = blocks_to_run("docs/image.md")
    fsx = here.parents[1]
    for name in ("data", "runs"):
        (fsx / name).mkdir()
    (here / "mamba-train.sqsh").touch()
    (fsx / "data/mine").symlink_to(user_folder / "data/builtin")
    (fsx / "runs/mine").symlink_to(user_folder / "runs/demo")
    cluster = make_cluster(tmp_path / "cluster", here)
    (cluster.image / "python3").write_text(PYTHON.format(tmp_path / "asked", here))
    advice = r"call `(\S+) in_image ...` and give `srun` `(\S+)`"
    variable, option = re.search(advice, text_of("docs/image.md")).groups()
    script = script_of(inside, here)
    script = script.replace("in_image ", f"{variable} in_image ")
    script = script.replace("srun ", f"srun {option} ")
    run_script(script, here, cluster)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 6
    for words in asked:
        assert forked.run(f"python {words}", here)
