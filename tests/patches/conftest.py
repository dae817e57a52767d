"""Provides patched Triton installations, and starts processes that use Triton's cache like ranks. They need neither a
GPU nor torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.triton_wheels import PATCHED, PATCHES, bare_triton_2_2, cache_manager_environment

SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    folder = bare_triton_2_2(tmp_path_factory.mktemp("patched"))
    subprocess.run([sys.executable, PATCHES / "apply.py", f"--site={folder}"], check=True)
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(
    scope="session",
    # The versions of Triton in the two stacks.
    params=[PATCHED, pytest.param("3.6.0", marks=pytest.mark.slow)],
)
def triton(request):
    """Returns the environment of a process whose Triton has the rank-0-only writer.

    The writer is the same for all versions of Triton, but Triton's own folders and calls differ.
    """
    if request.param == PATCHED:
        return request.getfixturevalue("patched")
    return cache_manager_environment(request.param)


def finish(process):
    """Waits for a process, asserts that it succeeds, and returns (stdout, stderr)."""
    output, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    return output, errors


class Cluster:
    """Starts ranks (triton_rank.py) that share a home folder below `folder`, and thereby Triton's cache. Lists the
    files that they write."""

    def __init__(self, folder):
        self.folder = folder
        self.count = 0
        for name in ("home", "private"):
            (folder / name).mkdir()

    def start(self, environment, plan, *, wrapper=(), **more):
        """Starts a rank. environment, more: environment variables. plan: the work of the rank, see triton_rank.py.
        wrapper: arguments before the command."""
        base = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder / "home"),
            "TRITON_RANK0_PRIVATE_DIR": str(self.folder / "private"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return subprocess.Popen(
            [*wrapper, sys.executable, str(SUPPORT / "triton_rank.py"), json.dumps(plan)],
            env={**base, **environment, **more},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def finish(self, *processes):
        """Waits for the ranks, asserts that they succeed, and returns their results."""
        return [json.loads(finish(process)[0]) for process in processes]

    def run(self, environment, plan, **more):
        return self.finish(self.start(environment, plan, **more))[0]

    def gate(self, ranks):
        """Returns the part of the plan that makes `ranks` processes start their work simultaneously."""
        self.count += 1
        (self.folder / f"gate{self.count}").mkdir()
        return {"gate": str(self.folder / f"gate{self.count}"), "ranks": ranks}

    def files(self, folder="home"):
        return sorted(path for path in (self.folder / folder).rglob("*") if path.is_file())


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)
