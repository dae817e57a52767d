"""A throw-away copy of the project for tests of the launcher outside Slurm."""

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))

import projects  # noqa: E402


@pytest.fixture
def launcher_project(tmp_path):
    """A project folder with a space in its name, a fake training program and a .venv."""
    project = projects.make_project(tmp_path / "the project")
    projects.make_venv(project)
    return project
