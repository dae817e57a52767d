"""Tests runs on several ranks: losses do not depend on the number of ranks, a checkpoint resumes on other ranks and
with other strategies, and ranks end if one of them is stuck or lost."""

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
    "position_weighting": True,  # gives the labels of each rank another total weight
    "global_batch_size": 12,
    "checkpoint_interval": 1,
    "eval_interval": 1,
    "eval_batches": 1,
    "schedule": "constant",
}


def losses_and_norms_of(folder):
    """Returns the losses, gradient norms and validation losses in a run's metrics."""
    names = ("loss", "grad_norm", "val_loss")
    return [entry.get(name) for entry in read_entries(folder / "metrics.jsonl") for name in names]


@pytest.mark.slow
@pytest.mark.torch22
def test_any_ranks_and_strategies_in_turn_give_the_losses_of_one_process(corpus, tmp_path):
    """A run that resumes on another number of ranks and with another strategy after each step has the losses of one
    process: no sample is lost or repeated, and the loss is the mean over the global batch. This includes context
    parallelism."""
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
        printed = forked.run_ranks(ranks, format_arguments(relay), per_node=per_node)
        assert step == 0 or f"step_0000000{step}, step {step}\n" in printed
    expected = losses_and_norms_of(tmp_path / "whole")
    assert losses_and_norms_of(tmp_path / "relay") == [
        number and pytest.approx(number, rel=1e-4) for number in expected
    ]


def train_stuck(world, settings, folder):
    """Trains with a timeout of six seconds, and writes stderr to a file. Rank 1 never reaches step 2."""
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
    """If one rank does not reach the next step, the watchdog prints the stacks and ends the job."""
    settings = settings_of(eval_interval=0, timeout_minutes=0.1)
    with pytest.raises(AssertionError):
        run_ranks(2, train_stuck, settings, tmp_path)
    errors = (tmp_path / "stderr-1").read_text()
    assert "made no progress" in errors and "in stuck" in errors


@pytest.mark.torch22
@pytest.mark.parametrize("survivor", [0, 1])
@pytest.mark.slow
def test_a_rank_that_lost_another_ends_with_one_line(corpus, tmp_path, survivor):
    """If one of two ranks is killed during a training with gloo, the other rank ends with an error of one line."""
    given = {"num_steps": 10_000, "dataset_path": corpus, "save_ckpt_path": tmp_path}
    ranks = forked.start_ranks(2, format_arguments({**TINY, **given, "sharding_strategy": "fsdp"}))
    try:
        while len(read_entries(tmp_path / "metrics.jsonl")) < 5:
            assert ranks[0].poll() is None and ranks[1].poll() is None
            time.sleep(0.1)
        ranks[1 - survivor].kill()
        output, _ = ranks[survivor].communicate(60)
    finally:
        for rank in ranks:
            rank.kill()
    lines = output.splitlines()
    errors = [line for line in lines if line.startswith("error:")]
    assert ranks[survivor].returncode == 1
    assert errors == lines[-1:], output
    assert errors[0].startswith(f"error: rank {survivor} lost another rank"), output
    assert "by peer" in errors[0] and "Traceback" not in output
