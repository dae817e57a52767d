"""The pinned stack and the newest one resume from each other's checkpoints, with other numbers of ranks."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.torch22]


@pytest.fixture
def pythons(project):
    """(an interpreter with torch 2.2, one with the newest torch)."""
    stack = os.environ.get("MAMBA_FSDP_TEST_STACK", "cpu")
    other = {"cpu": project / ".venv-torch2.2", "torch2.2": project / ".venv"}[stack] / "bin" / "python"
    if not (other.parent.parent / ".complete").exists():
        option = " --stack torch2.2" * (stack == "cpu")
        pytest.skip(f"needs both environments: {other.parent.parent} is made by tests/run.sh{option}")
    return (other, sys.executable) if stack == "cpu" else (sys.executable, other)


@pytest.fixture
def train(corpus, project, tiny_file):
    """train(interpreter, ranks, run folder, steps) -> what it printed."""
    def train(python, ranks, run, steps):
        words = {"config": tiny_file, "dataset_path": corpus, "save_ckpt_path": run, "num_steps": steps,
                 "schedule": "constant", "global_batch_size": 6, "batch_size": 1, "eval_interval": 0,
                 "sharding_strategy": "fsdp"}
        ranked = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "training.py"]
        done = subprocess.run([*ranked, *(f"--{key}={value}" for key, value in words.items())],
                              cwd=project, timeout=300, capture_output=True, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
    return train


def losses_of(entries):
    return [entry["loss"] for entry in entries if "loss" in entry]


def test_each_stack_goes_on_where_the_other_stopped(pythons, train, tmp_path, metrics_of):
    old, new = pythons
    train(new, 1, tmp_path / "whole", 8)
    relay = tmp_path / "relay"
    for steps, python, ranks in ((2, old, 2), (4, new, 3), (6, old, 1), (8, new, 2)):
        said = train(python, ranks, relay, steps)
        assert steps == 2 or f"step {steps - 2}" in said
    whole, parts = (losses_of(metrics_of(run)) for run in (tmp_path / "whole", relay))
    assert parts == pytest.approx(whole, rel=5e-5)


def test_the_pinned_stack_trains_saves_and_goes_on_by_itself(pythons, train, tmp_path, metrics_of):
    train(pythons[0], 2, tmp_path, 3)
    assert "step 3" in train(pythons[0], 2, tmp_path, 6)
    losses = losses_of(metrics_of(tmp_path))
    assert len(losses) == 6 and losses[-1] < losses[0]
