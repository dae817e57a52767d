"""Provides a temporary copy of the project, for tests of the launcher without Slurm."""

import pytest

from tests.support import projects


@pytest.fixture
def launcher_project(tmp_path, monkeypatch):
    """Returns the folder of a project with a fake training program and a .venv. The folder has a space in its name."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    project = projects.make_project(tmp_path / "the project")
    projects.make_venv(project)
    return project
