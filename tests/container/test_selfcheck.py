"""The self-check says that an environment is whole only when it is."""

import os
import subprocess
import sys

import pytest

from mamba_fsdp.ops.forms import OPERATORS

pytestmark = [pytest.mark.slow, pytest.mark.torch22]


def selfcheck(project, first_on_path=""):
    environment = {**os.environ, "PYTHONPATH": str(first_on_path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "mamba_fsdp", "selfcheck"], cwd=project, env=environment, capture_output=True, text=True
    )


def test_a_whole_environment_passes(project):
    """In the environment of the tests everything imports and a step of training lowers the loss."""
    done = selfcheck(project)
    assert done.returncode == 0, done.stderr
    assert "one training step on the CPU" in done.stdout and not done.stderr.count("error: ")
    table = done.stdout.partition("operators on cpu, torch.float32\n")[2].splitlines()
    assert [line.split()[0] for line in table[:8]] == list(OPERATORS)
    assert all(line.split()[1] in ("native", "portable", "by") for line in table[:8])


def test_what_is_broken_is_named(project, tmp_path):
    """A package that can't be imported and a module that needs it are errors with the reason; the exit code is not
    0."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    done = selfcheck(project, tmp_path)
    assert done.returncode == 1
    assert "error: check_package datasets: ImportError: broken on purpose" in done.stderr
