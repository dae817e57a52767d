"""A Python that is too old, or lacks the packages, is told in a line which one to use."""

import ast
import os
import shutil
import subprocess
import sys

import pytest

from mamba_fsdp import interpreter

BARE = [os.path.realpath(sys.executable), "-S"]  # as one of the system's, without any package
COMMANDS = [
    ["training.py", "--num_steps=3"],
    ["get_dataset.py", "a b"],
    ["-m", "mamba_fsdp", "inspect", "runs/a"],
    ["-m", "benchmarks.demo"],
]


def run(project, words):
    done = subprocess.run([*BARE, *words], cwd=project, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout and len(done.stderr.splitlines()) == 1, done
    return done.stderr


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_python_without_the_packages_names_the_one_to_use(project, tmp_path, words):
    for name in ("training.py", "get_dataset.py"):
        shutil.copy(project / name, tmp_path)
    for name in ("config", "mamba_fsdp", "benchmarks"):
        (tmp_path / name).symlink_to(project / name)
    (tmp_path / "mamba_fsdp").unlink()
    shutil.copytree(
        project / "mamba_fsdp",
        tmp_path / "mamba_fsdp",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    said = run(tmp_path, words)
    assert (
        said.startswith(f"error: {BARE[0]} lacks ")
        and "make the project's own, ./0.create_env.sh, then" in said
    )
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    command = subprocess.list2cmdline(words).replace('"', "'")
    assert run(tmp_path, words).endswith(
        f"; use the project's own: .venv/bin/python -S {command}\n"
    )


def test_a_python_that_is_too_old(monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match="^2$"):
        interpreter.need()
    assert " is Python 3.9; it takes 3.10 or newer; " in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "training.py",
        "get_dataset.py",
        "mamba_fsdp/__init__.py",
        "mamba_fsdp/__main__.py",
        "mamba_fsdp/interpreter.py",
        "benchmarks/__init__.py",
    ],
)
def test_an_old_python_reads_what_comes_before_the_question(project, name):
    ast.parse((project / name).read_text(), feature_version=(3, 6))


def test_ctrl_c_is_a_line_while_modules_are_imported_too(project):
    code = "from mamba_fsdp import interpreter\ninterpreter.need('fire')\nraise KeyboardInterrupt"
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True)
    assert (
        done.stderr == "\nstopped by Ctrl-C\n" and done.returncode
    )  # as Python has it: bash says 130
