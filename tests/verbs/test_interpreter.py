"""Tests mamba_fsdp.interpreter: a Python that is too old or lacks packages gives an error of one line, which names the
Python to use."""

import ast
import os
import sys
from types import SimpleNamespace

import pytest

from mamba_fsdp import interpreter
from tests.support.processes import run_program
from tests.support.terminal import drawings

BARE = [os.path.realpath(sys.executable), "-S"]  # like a system Python without packages
COMMANDS = [
    ["training.py", "--num_steps=3"],
    ["get_dataset.py", "a b"],
    ["-m", "mamba_fsdp", "inspect", "runs/a"],
    ["-m", "benchmarks.scan"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_missing_packages_are_an_error_that_names_the_right_python(project, words):
    done = run_program(*BARE, *words, cwd=project)
    assert done.returncode == 2 and not done.stdout and len(done.stderr.splitlines()) == 1, done
    assert done.stderr.startswith(f"error: {BARE[0]} lacks ")
    assert done.stderr.endswith("; use .venv/bin/python, which ./0.create_env.sh makes\n")


def test_a_python_that_is_too_old(monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match="^2$"):
        interpreter.require_packages()
    assert " lacks features of Python 3.10; " in capsys.readouterr().err


def test_a_python_without_docstrings(monkeypatch, capsys):
    """Python's option -OO is refused, because --help prints the docstrings of the settings."""
    monkeypatch.setattr(sys, "flags", SimpleNamespace(optimize=2))
    with pytest.raises(SystemExit, match="^2$"):
        interpreter.require_packages()
    assert "error: -OO removes the texts of --help; leave it out" in capsys.readouterr().err


BEFORE_THE_QUESTION = [
    "training.py",
    "get_dataset.py",
    "mamba_fsdp/__init__.py",
    "mamba_fsdp/__main__.py",
    "mamba_fsdp/interpreter.py",
    "benchmarks/__init__.py",
]


def test_old_pythons_can_parse_the_files_before_the_check(project):
    for name in BEFORE_THE_QUESTION:
        ast.parse((project / name).read_text(), feature_version=(3, 6))


def test_a_terminal_shows_immediately_that_libraries_are_loading(project, terminal):
    process = terminal.start(
        [sys.executable, "-m", "mamba_fsdp", "checkpoints", "/nowhere"], cwd=project
    )
    assert process.wait(400) == 2
    first, last = drawings(terminal.text())
    assert first == "loading the libraries ..." and last.startswith("error: /nowhere: ")


def test_ctrl_c_stops_an_import_that_would_catch_it(project, tmp_path):
    """Ctrl-C ends the program during an import, even if the imported module catches KeyboardInterrupt, as torch does
    while it imports NumPy."""
    (tmp_path / "deaf.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    code = f"import sys; sys.path += ['.', {str(tmp_path)!r}]\nfrom mamba_fsdp import interpreter\n"
    code += "interpreter.require_packages('fire')\nimport deaf\nprint('went on')"
    done = run_program(sys.executable, "-c", code, cwd=project)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nstopped by Ctrl-C\n")
