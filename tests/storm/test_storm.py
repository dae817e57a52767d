"""Runs tests.storm and tests.storm.frozen with a fixed seed: four kills of runs, and a freeze before each write.

With STORM_ROUNDS=200, there are 200 kills, spread over all strategies. This takes a night. With FROZEN_STORM=all, a run
is frozen before each call that touches its files.
"""

import os
import sys

import pytest

from tests.support.processes import run_program

pytestmark = pytest.mark.slow


def rage(project, *arguments):
    done = run_program(sys.executable, "-m", *arguments, cwd=project, OMP_NUM_THREADS="1")
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


def test_killed_runs_equal_uninterrupted_ones(project):
    rounds = os.environ.get("STORM_ROUNDS")
    kills = ["--rounds=4", "--strategies=ddp,context", "--seed=1"]
    if rounds:
        kills = [f"--rounds={rounds}"]
    rage(project, "tests.storm", *kills)


def test_a_frozen_run_does_not_change_files_of_the_run_that_took_over(project):
    every_call = ["--all"] if os.environ.get("FROZEN_STORM") == "all" else []
    rage(project, "tests.storm.frozen", *every_call)
