"""Provides fixtures for tests on the null device, a GPU driver that computes nothing. torch's CUDA build and Triton run
on it unchanged (tests/support/nullgpu/README.md)."""

import json
import subprocess

import pytest

from tests.support.nullgpu import build
from tests.support.ports import hold_port, rank_environment

RANKS_OF_A_NODE = 2


@pytest.fixture(scope="session")
def forks(tmp_path_factory, project):
    """Returns a function forks(*programs) that runs programs simultaneously on the null device, and returns [exit code,
    output] of each. A program is [arguments of Python, environment variables], see tests/support/nullgpu/forks.py."""
    folder = tmp_path_factory.mktemp("nullgpu")
    try:
        build.build(folder)
    except OSError as error:
        pytest.skip(str(error))
    shared = folder.parents[1] / "triton"  # Triton's cache, shared by all processes of the test run
    shared.mkdir(exist_ok=True)
    (folder / "triton").symlink_to(shared)
    process = subprocess.Popen(
        [build.interpreter(folder), "-m", "tests.support.nullgpu.forks"],
        env=build.environment(folder, PYTHONFAULTHANDLER=1),
        cwd=project,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(*programs):
        print(json.dumps(programs, default=str), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    with process:
        yield run


@pytest.fixture
def run(forks):
    """Returns a function run(*arguments of Python, NULLGPU_...=value) that runs a process on the null device, and
    returns (exit code, output)."""

    def run(*arguments, **variables):
        texts = {name: str(value) for name, value in variables.items()}
        return forks([list(map(str, arguments)), texts])[0]

    return run


@pytest.fixture
def train(forks, tmp_path):
    """Returns a function train(setting=value ...) that returns a report of each training of a process, see
    tests/support/nullgpu/training.py.

    ranks: the number of processes, on nodes of two. Their reports must be equal.
    """

    def train(ranks=1, **settings):
        words = ["-m", "tests.support.nullgpu.training", f"save_ckpt_path={tmp_path / 'run'}"]
        words += [f"{name}={value}" for name, value in settings.items()]
        local = min(ranks, RANKS_OF_A_NODE)
        with hold_port() as held:
            programs = []
            for rank in range(ranks):
                own = {"NULLGPU_DEVICES": str(local)}
                if ranks > 1:
                    own |= rank_environment(rank, ranks, held.getsockname()[1], local)
                programs.append([words, own])
            ended = forks(*programs)
        failed = [text[-4000:] for code, text in ended if code]
        assert not failed, "\n".join(failed)
        reports = []
        for _, text in ended:
            # A line with "nullgpu:" reports an exceeded limit of the device, or a pointer of the CPU.
            assert "nullgpu:" not in text
            reports.append([json.loads(at) for at in text.splitlines() if at.startswith("{")])
        for of_rank in reports:  # the memory that torch keeps can differ between ranks
            assert [of_time | {"left": {}} for of_time in of_rank] == [
                of_time | {"left": {}} for of_time in reports[0]
            ]
        return reports[0]

    return train
