"""The commands of docs/image.md that run inside the image, as they are written."""

import re
import shlex
import subprocess
import sys

import pytest

import training
from config.settings_page import settings_page
from mamba_fsdp import __main__, command_line
from tests.support.pyxis import make_cluster
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
