"""A dozen kills, always the same; `python -m tests.storm --rounds=200 --busy=2` is the storm of a night."""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_killed_runs_end_as_unbroken_ones(project):
    rounds = os.environ.get("STORM_ROUNDS")
    kills = [f"--rounds={rounds}"] if rounds else ["--rounds=12", "--seed=1"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.storm", *kills],
        cwd=project,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-8000:]
