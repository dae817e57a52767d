"""Fixtures of the tests on the null device: a driver that computes nothing, over which torch's CUDA build and Triton run
unchanged (tests/support/nullgpu/README.md)."""

import json
import subprocess

import pytest

from tests.support.nullgpu import build
from tests.support.ports import hold_port, rank_environment

RANKS_OF_A_NODE = 2


@pytest.fixture(scope="session")
def forks(tmp_path_factory, project):
    """forks([words of Python, variables] ...) -> [exit code, output] of each, which run beside each other on the null
    device, see tests/support/nullgpu/forks.py."""
    folder = tmp_path_factory.mktemp("nullgpu")
    try:
        build.build(folder)
    except OSError as error:
        pytest.skip(str(error))
    shared = folder.parents[1] / "triton"  # by all processes of the test run
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
    """run(*words of Python, NULLGPU_...=value) -> (exit code, output) of a process on the null device."""

    def run(*words, **variables):
        texts = {name: str(value) for name, value in variables.items()}
        return forks([list(map(str, words)), texts])[0]

    return run


@pytest.fixture
def train(forks, tmp_path):
    """train(setting=value ...) -> a report of each training of a process, see tests/support/nullgpu/training.py. ranks:
    so many processes, on nodes of two, the reports of which must be alike."""

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
            assert "nullgpu:" not in text  # a limit passed, a pointer of the CPU
            reports.append([json.loads(at) for at in text.splitlines() if at.startswith("{")])
        for of_rank in reports:  # of memory, torch may keep more on one
            assert [of_time | {"left": {}} for of_time in of_rank] == [
                of_time | {"left": {}} for of_time in reports[0]
            ]
        return reports[0]

    return train
