"""The tools of pyproject.toml find nothing: ruff in any Python file, which it has formatted too, the type checker in library and settings."""

import subprocess
import sys

import pytest


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
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=project, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
