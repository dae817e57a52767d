"""A throw-away copy of the project for tests of the launcher outside Slurm."""

import pytest

from tests.support import projects


@pytest.fixture
def launcher_project(tmp_path):
    """A project folder with a space in its name, a fake training program and a .venv."""
    project = projects.make_project(tmp_path / "the project")
    projects.make_venv(project)
    return project
