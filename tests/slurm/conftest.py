"""Starts a temporary Slurm of six nodes, for tests that submit the project's own launcher."""

import os
import re
import sys

import pytest

from tests.support import cluster as slurm
from tests.support import projects

CONFIG = """PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=gpus Nodes=node[4-6] State=UP
PartitionName=urgent Nodes=node[1-3] PriorityTier=10 State=UP
PartitionName=low Nodes=node[1-3] PriorityTier=1 GraceTime=400 PreemptMode=REQUEUE State=UP"""


@pytest.fixture
def slurm_project(tmp_path):
    """Makes a project with a fake training program and a .venv on the nodes' shared file system. The folder of the
    project has a space in its name."""
    project = projects.make_project(tmp_path / "the project")
    projects.make_venv(project)
    (project / "data/builtin").mkdir(parents=True)
    return project


@pytest.fixture(scope="module")
def started_cluster(tmp_path_factory):
    """Starts three nodes without GPUs, two nodes with two GPUs, and one node with four."""
    reason = slurm.missing()
    if reason:
        pytest.skip(reason)
    python = os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))
    shared = [tmp_path_factory.getbasetemp(), sys.prefix, python]
    folder = tmp_path_factory.mktemp("slurm")
    with slurm.Cluster(
        folder, gpus=[0, 0, 0, 2, 2, 4], shared=shared, extra_config=CONFIG
    ) as cluster:
        # The daemons have read the file, and keep the long KillWait, so that jobs can end after scancel. srun reads the
        # file later, and waits only 10 s for a launcher after the launcher of another node was killed.
        settings = cluster.folder / "etc/slurm.conf"
        settings.write_text(re.sub("KillWait=.*", "KillWait=10", settings.read_text()))
        yield cluster


@pytest.fixture
def cluster(started_cluster):
    """Provides the cluster, and makes all its nodes idle after the test."""
    yield started_cluster
    started_cluster.reset()
