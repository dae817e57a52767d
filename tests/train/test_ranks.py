"""The same run on any number of ranks: equal losses, and a checkpoint resumes on other ranks and strategies."""

import os
import subprocess
import sys

import pytest

from tests.support.forked import said_by, start_ranks
from tests.support.tiny import TINY

STEPS = {
    "num_steps": 4,
    "global_batch_size": 12,
    "checkpoint_interval": 2,
    "eval_interval": 4,
    "schedule": "constant",
}


@pytest.fixture
def train_on(corpus):
    """train_on(ranks, run, **settings): a whole run. Returns what rank 0 printed."""

    def run_on(ranks, run, **given):
        words = {**TINY, **STEPS, "dataset_path": corpus, "save_ckpt_path": run, **given}
        return said_by(start_ranks(ranks, [f"--{key}={value}" for key, value in words.items()]))

    return run_on


JOINS = """
from datetime import timedelta
import torch.distributed as dist
def join(timeout_minutes, join=run.start_world):
    world = join(timeout_minutes=10)  # one may come a while after the other
    world.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(minutes=timeout_minutes), dist.group.WORLD)
    return world
run.start_world = join
"""


@pytest.fixture
def train_changed(corpus, project, tmp_path):
    """train_changed(lines, **settings): a run on two ranks, with twelve seconds of patience once they have met, after
    these lines."""

    def start(lines, **given):
        words = {
            **TINY,
            "dataset_path": corpus,
            "save_ckpt_path": tmp_path / "run",
            "timeout_minutes": 0.2,
            **given,
        }
        (tmp_path / "changed.py").write_text(
            "import os, sys, time; sys.path.insert(0, '.')\n"
            f"from config import resolve; from mamba_fsdp.train import loop, run\n{JOINS}{lines}"
            f"run.run_training(resolve.resolve_settings({ {key: str(value) for key, value in words.items()} })[0])\n"
        )
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
        ]
        return subprocess.run(
            [*torchrun, tmp_path / "changed.py"],
            cwd=project,
            capture_output=True,
            text=True,
            timeout=800,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(project)},
        )

    return start


@pytest.mark.slow
def test_any_ranks_and_strategies_in_turn_give_the_losses_of_one_process(
    train_on, tmp_path, metrics_of
):
    """Also from the first step on; nothing is lost or repeated where another number of ranks resumes."""
    train_on(1, tmp_path / "whole", num_steps=8, batch_size=2)
    relay = tmp_path / "relay"
    legs = ((4, "fsdp"), (2, "ddp"), (3, "fsdp"), (1, "none"))
    for steps, (ranks, strategy) in zip((2, 4, 6, 8), legs):
        said = train_on(ranks, relay, num_steps=steps, sharding_strategy=strategy, batch_size=1)
        assert steps == 2 or f"step {steps - 2}" in said
        assert (
            ranks == 1 or "slowest_rank" in (relay / "metrics.jsonl").read_text().splitlines()[-2]
        )
    whole, parts = (
        [entry["loss"] for entry in metrics_of(run) if "loss" in entry]
        for run in (tmp_path / "whole", relay)
    )
    assert parts == pytest.approx(whole, rel=2e-5)


@pytest.mark.slow
def test_a_rank_that_waits_in_vain_ends_with_where_it_stands(train_changed):
    """One rank never comes to the next step; the watchdog of each says where it stands, and the job ends."""
    done = train_changed(
        "steps = []\n"
        "def stuck(parallel, batch):\n"
        "    if parallel.world.rank == 1 and len(steps) == 1: time.sleep(300)\n"
        "    steps.append(batch)\n"
        "    return clean(parallel, batch)\n"
        "clean, loop.batch_loss = loop.batch_loss, stuck\n"
    )
    assert done.returncode and "made no progress" in done.stderr and "in stuck" in done.stderr


SLOW_DISK = (
    "from mamba_fsdp.checkpoint import files\n"
    "class Slow(files.Crc32):\n"
    "    def update(self, data):\n"
    "        if os.environ['RANK'] == '1' and len(data) > 1000: {wait}\n"
    "        super().update(data)\n"
    "files.HASHES['xxh3'] = Slow\n"
    "files.BLOCK = files.READ_BLOCK = 8000\n"
)


@pytest.mark.slow
def test_one_slow_disk_is_no_hang(train_changed):
    """Writing, and verifying at the next start, takes one rank longer than timeout_minutes; the other waits for it."""
    done = train_changed(SLOW_DISK.format(wait="time.sleep(1.5)"), num_steps=1)
    assert done.returncode == 0, done.stderr
    done = train_changed(SLOW_DISK.format(wait="time.sleep(1.5)"), num_steps=1)
    assert done.returncode == 0 and "over" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_hanging_disk_is_one(train_changed):
    done = train_changed(SLOW_DISK.format(wait="time.sleep(300)"))
    assert (
        done.returncode and "made no progress" in done.stderr and "in write_pieces" in done.stderr
    )
