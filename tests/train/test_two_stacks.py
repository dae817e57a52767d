"""The pinned stack and the newest one resume from each other's checkpoints, with other numbers of ranks."""

import os
import subprocess

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.torch22]
COMMON = {"schedule": "constant", "global_batch_size": 6, "batch_size": 1, "eval_interval": 0}


@pytest.fixture
def resume(corpus, project, tiny_file):
    """resume(interpreter, ranks, run folder, steps) -> what it printed."""

    def resume(python, ranks, run, steps):
        words = {
            "config": tiny_file,
            "dataset_path": corpus,
            "save_ckpt_path": run,
            "num_steps": steps,
            **COMMON,
            "sharding_strategy": "fsdp",
        }
        ranked = [
            python,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "training.py",
        ]
        done = subprocess.run(
            [*ranked, *(f"--{key}={value}" for key, value in words.items())],
            cwd=project,
            timeout=800,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return resume


def losses_of(entries):
    return [entry["loss"] for entry in entries if "loss" in entry]


def test_each_stack_resumes_where_the_other_stopped(pythons, train, resume, tmp_path, metrics_of):
    train(tmp_path / "whole", num_steps=6, **COMMON)
    relay = tmp_path / "relay"
    for steps, stack, ranks in ((2, "pinned", 2), (4, "newest", 3), (6, "pinned", 1)):
        said = resume(pythons[stack], ranks, relay, steps)
        assert steps == 2 or f"step {steps - 2}" in said
    whole, parts = (losses_of(metrics_of(run)) for run in (tmp_path / "whole", relay))
    assert len(whole) == 6 and whole[-1] < whole[0] and parts == pytest.approx(whole, rel=5e-5)
