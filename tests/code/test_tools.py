"""The tools of pyproject.toml find nothing: ruff in any Python file, which it has formatted too, the type checker in library and settings."""

import sys

import pytest

from tests.support.processes import run_program


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "--no-cache", "."],
        ["ruff", "format", "--check", "--no-cache", "."],
        pytest.param(
            ["mypy", "--no-error-summary"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ruff", "format", "mypy"],
)
def test_finds_nothing(project, command):
    done = run_program(sys.executable, "-m", *command, cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
