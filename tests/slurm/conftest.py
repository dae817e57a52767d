"""A throw-away Slurm with a project in it, for tests that submit the project's own launcher."""

import os
import sys

import pytest

from tests.support import cluster as slurm
from tests.support import projects


@pytest.fixture
def slurm_project(tmp_path):
    """A project folder (with a space in its name), fake training program and .venv on the nodes' shared file system."""
    project = projects.make_project(tmp_path / "the project")
    projects.make_venv(project)
    (project / "data/builtin").mkdir(parents=True)
    return project


@pytest.fixture
def start_cluster(tmp_path):
    """start_cluster(nodes=2, gpus=0, extra_config="") -> a running Cluster, ended after the test."""
    reason = slurm.missing()
    if reason:
        pytest.skip(reason)
    running = []

    def start(**options):
        shared = [
            tmp_path,
            sys.prefix,
            os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))),
        ]
        running.append(slurm.Cluster(tmp_path / "slurm", shared=shared, **options).__enter__())
        return running[-1]

    yield start
    for cluster in running:
        cluster.__exit__()
