"""Tests that the same run on any number of ranks has equal losses, that a checkpoint resumes on other ranks and
strategies, and that ranks end if one of them is stuck or lost."""

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from mamba_fsdp.run.records import read_entries
from mamba_fsdp.trainer import loop
from tests.support import forked
from tests.support.ranks import run_ranks, train_whole
from tests.support.tiny import HYBRID, TINY, format_arguments

RELAY = {
    **TINY,
    **HYBRID,
    "position_weighting": True,  # so that ranks differ in the weight of their labels
    "global_batch_size": 12,
    "checkpoint_interval": 1,
    "eval_interval": 1,
    "eval_batches": 1,
    "schedule": "constant",
}


def numbers_of(folder):
    """Returns the loss and the gradient norm of each step of a run, and its validation losses."""
    names = ("loss", "grad_norm", "val_loss")
    return [entry.get(name) for entry in read_entries(folder / "metrics.jsonl") for name in names]


@pytest.mark.slow
@pytest.mark.torch22
def test_any_ranks_and_strategies_in_turn_give_the_losses_of_one_process(corpus, tmp_path):
    """The losses agree from the first step on, and if ranks share sequences.

    The loss is the mean over the global batch. If another number of ranks resumes, no sample is lost or repeated.
    """
    common = {**RELAY, "dataset_path": corpus}
    whole = format_arguments({**common, "save_ckpt_path": tmp_path / "whole", "batch_size": 2})
    forked.run_ranks(1, [*whole, "--num_steps=4"])
    relay = {**common, "save_ckpt_path": tmp_path / "relay", "batch_size": 1}
    legs = [
        (4, 2, "hsdp", 2),
        (2, 2, "ddp", 1),
        (3, 3, "fsdp", 3),
        (1, 1, "none", 1),
    ]
    for step, (ranks, per_node, strategy, sharing) in enumerate(legs):
        relay |= {"num_steps": step + 1, "sharding_strategy": strategy, "context_parallel": sharing}
        said = forked.run_ranks(ranks, format_arguments(relay), per_node=per_node)
        assert step == 0 or f"step_0000000{step}, step {step}\n" in said
    expected = numbers_of(tmp_path / "whole")
    assert numbers_of(tmp_path / "relay") == [
        number and pytest.approx(number, rel=1e-4) for number in expected
    ]


def train_stuck(world, settings, folder):
    """Trains with a timeout of six seconds. Rank 1 never reaches step 2. Its stderr is written to a file."""
    os.dup2(os.open(folder / f"stderr-{world.rank}", os.O_WRONLY | os.O_CREAT), 2)
    dist.distributed_c10d._set_pg_timeout(timedelta(minutes=0.1), dist.group.WORLD)
    batch_loss = loop.batch_loss
    batches = []

    def stuck(module, batch):
        if world.rank == 1 and batches:
            time.sleep(300)
        batches.append(batch)
        return batch_loss(module, batch)

    loop.batch_loss = stuck
    train_whole(world, settings)


@pytest.mark.slow
def test_a_rank_that_waits_forever_prints_its_stack_and_exits(settings_of, tmp_path):
    """If one rank never reaches the next step, the watchdog prints the stacks and ends the job."""
    settings = settings_of(eval_interval=0, timeout_minutes=0.1)
    with pytest.raises(AssertionError):
        run_ranks(2, train_stuck, settings, tmp_path)
    said = (tmp_path / "stderr-1").read_text()
    assert "made no progress" in said and "in stuck" in said


@pytest.mark.torch22
@pytest.mark.parametrize("survivor", [0, 1])
@pytest.mark.slow
def test_a_rank_that_lost_another_ends_with_one_line(corpus, tmp_path, survivor):
    """Either of two ranks is killed while they train over gloo."""
    given = {"num_steps": 10_000, "dataset_path": corpus, "save_ckpt_path": tmp_path}
    ranks = forked.start_ranks(2, format_arguments({**TINY, **given, "sharding_strategy": "fsdp"}))
    try:
        while len(read_entries(tmp_path / "metrics.jsonl")) < 5:
            assert ranks[0].poll() is None and ranks[1].poll() is None
            time.sleep(0.1)
        ranks[1 - survivor].kill()
        said, _ = ranks[survivor].communicate(60)
    finally:
        for rank in ranks:
            rank.kill()
    lines = said.splitlines()
    errors = [line for line in lines if line.startswith("error:")]
    assert ranks[survivor].returncode == 1
    assert errors == lines[-1:], said
    assert errors[0].startswith(f"error: rank {survivor} lost another rank"), said
    assert "by peer" in errors[0] and "Traceback" not in said
