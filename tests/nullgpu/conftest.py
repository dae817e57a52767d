"""Fixtures of the tests on the null device: a driver that computes nothing, over which torch's CUDA build and Triton run
unchanged (tests/support/nullgpu/README.md)."""

import contextlib
import json
import subprocess
import sys

import pytest

from tests.support.nullgpu import build
from tests.support.ports import hold_port, rank_environment

MOST_SECONDS = 240
RANKS_OF_A_NODE = 2


@pytest.fixture(scope="session")
def null_device(tmp_path_factory):
    """The folder of the null device's libraries."""
    folder = tmp_path_factory.mktemp("nullgpu")
    build.build(folder)
    return folder


@pytest.fixture
def start(null_device, project):
    """start(*words of Python, NULLGPU_...=value) -> a process on the null device. Those of a test are ended with it."""
    with contextlib.ExitStack() as processes:

        def start(*words, **variables):
            process = subprocess.Popen(
                [sys.executable, *map(str, words)],
                env=build.environment(null_device, **variables),
                cwd=project,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.enter_context(process)
            processes.callback(process.kill)
            return process

        yield start


@pytest.fixture
def train(start, tmp_path):
    """train(setting=value ...) -> a report of each training of a process, see tests/support/nullgpu/training.py. ranks:
    so many processes, on nodes of two, the reports of which must be alike."""

    def train(ranks=1, variables=None, **settings):
        words = ["-m", "tests.support.nullgpu.training", f"save_ckpt_path={tmp_path / 'run'}"]
        words += [f"{name}={value}" for name, value in settings.items()]
        local = min(ranks, RANKS_OF_A_NODE)
        shared = {"NULLGPU_DEVICES": local, **(variables or {})}
        with hold_port() as held:
            processes = []
            for rank in range(ranks):
                own = {}
                if ranks > 1:
                    own = rank_environment(rank, ranks, held.getsockname()[1])
                    own |= {"LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
                processes.append(start(*words, **shared, **own))
            reports = [report_of(process) for process in processes]
        assert all(report == reports[0] for report in reports)
        return reports[0]

    def report_of(process):
        stdout, stderr = process.communicate(timeout=MOST_SECONDS)
        assert process.returncode == 0, stdout[-2000:] + stderr[-4000:]
        assert "nullgpu:" not in stderr, stderr[-2000:]  # a limit passed, a pointer of the CPU
        return [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]

    return train
