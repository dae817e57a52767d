"""The commands of docs/image.md on a cluster and inside the image, as they are written."""

import json
import re
import shlex
import subprocess
import sys

import pytest

import training
from config.settings_page import settings_page
from mamba_fsdp import __main__, command_line
from tests.launcher.conftest import launcher_project  # noqa: F401 (a fixture)
from tests.support.pyxis import SQUASHFS, make_cluster
from tests.verbs.conftest import used  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow
# Writes down what it is to run.
PYTHON = """#!/bin/sh
echo "$@" >> {}
[ "$PWD" = {} ] || exit 1
"""


def run_inside(words, monkeypatch):
    """The exit code of python3 with these words, in this process."""
    try:
        if words[0] == "training.py":
            command_line.run(training.main, settings_page, words[1:])
        else:
            assert words[:2] == ["-m", "mamba_fsdp"]
            monkeypatch.setattr(sys, "argv", words[1:])
            __main__.main()
    except SystemExit as error:
        return error.code
    return 0


def test_commands_run(used, project, tmp_path, monkeypatch, capsys):  # noqa: F811
    """srun is a stand-in that does with its options what Slurm and Pyxis do; its nodes have no GPUs."""
    page = (project / "docs/image.md").read_text()
    _, _, section = page.partition("\n## The other commands, inside the image\n")
    commands = re.search(r"\n\n((?:    .*\n)+)\n", section)[1]
    without_gpus = re.search(r"call `(\S+) in_image ...` and give `srun` `(\S+)`", section)
    shared = tmp_path / "fsx"
    here = shared / "me/mamba-train"
    for folder in (here, shared / "data", shared / "runs"):
        folder.mkdir(parents=True)
    (here / "mamba-train.sqsh").touch()
    (shared / "data/mine").symlink_to(used / "data/builtin")
    (shared / "runs/mine").symlink_to(used / "runs/demo")
    cluster = make_cluster(tmp_path / "cluster", project)
    (cluster.image / "python3").write_text(PYTHON.format(tmp_path / "asked", here))
    script = commands.replace("/fsx", str(shared))
    script = script.replace("in_image ", f"{without_gpus[1]} in_image ")
    script = script.replace("srun ", f"srun {without_gpus[2]} ")
    subprocess.run(["bash", "-euc", script], env=cluster.environment, check=True)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == commands.count("    in_image ") == 6
    for words in asked:
        code = run_inside(shlex.split(words), monkeypatch)
        told = capsys.readouterr()
        assert code == 0 and told.out, (words, told.err)


def test_a_cluster_is_checked_makes_tokens_and_trains(launcher_project, project, tmp_path):  # noqa: F811
    """Slurm's commands are stand-ins; get_dataset.py writes its words down, and nothing trains."""
    page = (project / "docs/image.md").read_text()
    _, _, section = page.partition("`mamba-train.sqsh` beside `1.train.sbatch`:\n")
    commands = re.match(r"\n((?:    .*\n)+)", section)[1]
    shared = tmp_path / "fsx"
    (shared / "texts").mkdir(parents=True)
    (shared / "texts/a.jsonl").touch()
    (launcher_project / "mamba-train.sqsh").write_bytes(SQUASHFS)
    cluster = make_cluster(tmp_path / "cluster", launcher_project)
    done = subprocess.run(
        ["bash", "-euc", commands.replace("/fsx", str(shared))],
        cwd=launcher_project,
        env=cluster.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("Train") and "\nfit to train\n" in done.stdout
    made = (shared / "data/mine/train/index.json").read_text()
    assert made == f"{shared}/texts/*.jsonl {shared}/data/mine"
    steps = map(json.loads, (tmp_path / "cluster/record").read_text().splitlines())
    trained = [words for words in steps if "mamba_fsdp.launch.node" in words]
    settings = [words[words.index("training.py") + 1 :] for words in trained]
    assert settings == [
        ["--config=config/demo.yaml"],
        [f"--dataset_path={shared}/data/mine", f"--save_ckpt_path={shared}/runs/mine"],
    ]
