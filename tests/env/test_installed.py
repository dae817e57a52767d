"""Tests that the installed package works in its own environment, without the checkout and from any folder."""

import re
import shlex
import shutil
import subprocess

import pytest

from tests.support import projects
from tests.support.processes import run_program

pytestmark = pytest.mark.slow

TINY = "--d_model=16 --d_state=8 --n_layer=1 --seq_length=32 --batch_size=1 --report_interval=1"
TEXT = "--tokenizer=train:300 --validation_fraction=0.2"
COMMANDS = [
    f"tokenize texts data/texts {TEXT}",
    f"train --config=demo --dataset_path=data/texts --save_ckpt_path=runs/a --num_steps=3 {TINY}",
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Creates an environment with the package and with the other packages of the tests' environment. Returns its
    path."""
    source = projects.make_project(tmp_path_factory.mktemp("installed") / "source", training=None)
    shutil.copy(projects.PROJECT / "README.md", source)
    venv = projects.make_venv(source)
    pip = [venv / "bin/python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", source], check=True)
    return venv


def test_it_trains_and_loads_from_another_folder(installed, tmp_path):
    (tmp_path / "texts").mkdir()
    for name in range(20):
        text = f"Once there were {name} words, and they were told again. " * 20
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    for command in COMMANDS:
        arguments = shlex.split(command)
        done = run_program(installed / "bin/mamba-fsdp", *arguments, cwd=tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    code = "import mamba_fsdp; print(mamba_fsdp.__file__); mamba_fsdp.load('runs/a')"
    done = run_program(installed / "bin/python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith(str(installed)), done


def test_the_stacks_install_all_dependencies(project):
    """The requirements of each stack contain all dependencies of the package. Only names are compared, because only
    the files in requirements/ contain versions."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11 and newer have it
    package = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    for stack in ("cpu", "torch2.2"):
        listed = (project / f"requirements/{stack}.txt").read_text().lower()
        pinned = set(re.findall(r"^([a-z0-9_-]+)==", listed, re.MULTILINE))
        assert set(package["dependencies"]) <= pinned
