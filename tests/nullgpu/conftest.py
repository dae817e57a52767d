"""Fixtures of the tests on the null device: a driver that computes nothing, over which torch's CUDA build and Triton run
unchanged (tests/support/nullgpu/README.md)."""

import contextlib
import json
import signal
import subprocess
import time

import pytest

from tests.support.nullgpu import build
from tests.support.ports import hold_port, rank_environment

MOST_SECONDS = 900  # of a hang; it takes a tenth
RANKS_OF_A_NODE = 2


@pytest.fixture(scope="session")
def null_device(tmp_path_factory):
    """The folder of the null device's libraries."""
    folder = tmp_path_factory.mktemp("nullgpu")
    try:
        build.build(folder)
    except OSError as error:
        pytest.skip(str(error))
    shared = folder.parents[1] / "triton"  # by all processes of the test run
    shared.mkdir(exist_ok=True)
    (folder / "triton").symlink_to(shared)
    return folder


@pytest.fixture
def start(null_device, project):
    """start(*words of Python, NULLGPU_...=value) -> a process on the null device, which says its stacks on SIGABRT. Those
    of a test are ended with it."""
    with contextlib.ExitStack() as processes:

        def start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **variables):
            process = subprocess.Popen(
                [build.interpreter(null_device), *map(str, words)],
                env=build.environment(null_device, PYTHONFAULTHANDLER=1, **variables),
                cwd=project,
                stdout=stdout,
                stderr=stderr,
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
        outputs = [tmp_path / f"rank_{rank}.out" for rank in range(ranks)]
        with hold_port() as held, contextlib.ExitStack() as files:
            processes = []
            for rank, path in enumerate(outputs):
                own = {}
                if ranks > 1:
                    own = rank_environment(rank, ranks, held.getsockname()[1])
                    own |= {"LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
                output = files.enter_context(path.open("w"))
                both = {"stdout": output, "stderr": subprocess.STDOUT}
                processes.append(start(*words, **both, **shared, **own))
            await_all(processes)
        said = [path.read_text() for path in outputs]
        failed = [text for process, text in zip(processes, said) if process.returncode]
        assert not failed, "\n".join(text[-4000:] for text in failed)
        assert not any("nullgpu:" in text for text in said)  # a limit passed, a pointer of the CPU
        reports = [
            [json.loads(at) for at in text.splitlines() if at.startswith("{")] for text in said
        ]
        for of_rank in reports:  # of memory, torch may keep more on one
            assert [of_time | {"left": {}} for of_time in of_rank] == [
                of_time | {"left": {}} for of_time in reports[0]
            ]
        return reports[0]

    return train


def await_all(processes):
    """Return once all have ended or one has failed. Those that take too long say where they stand, and end."""
    end = time.monotonic() + MOST_SECONDS
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            return
        if time.monotonic() > end:
            for process in processes:
                process.send_signal(signal.SIGABRT)
            for process in processes:
                process.wait()
        time.sleep(0.1)
