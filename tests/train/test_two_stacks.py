"""The pinned stack and the newest one resume from each other's checkpoints and their own, on other numbers of ranks."""

import os
import subprocess

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.torch22]


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
    old, new = pythons["pinned"], pythons["newest"]
    train(new, 1, tmp_path / "whole", 8)
    relay, before = tmp_path / "relay", 0
    for steps, python, ranks in ((2, old, 2), (3, old, 2), (5, new, 3), (6, old, 1), (8, new, 2)):
        said = train(python, ranks, relay, steps)
        assert before == 0 or f"step {before}" in said
        before = steps
    whole, parts = (losses_of(metrics_of(run)) for run in (tmp_path / "whole", relay))
    assert parts == pytest.approx(whole, rel=5e-5)
