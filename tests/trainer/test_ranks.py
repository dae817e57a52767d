"""The same run on any number of ranks: equal losses, and a checkpoint resumes on other ranks and strategies."""

import os
import signal
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from xxhash import xxh3_64

from mamba_fsdp.checkpoint import files
from mamba_fsdp.trainer import loop, run
from tests.support.checkpoints import equal
from tests.support.forked import said_by, start_ranks
from tests.support.ranks import run_ranks
from tests.support.tiny import TINY, as_words

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
        return said_by(start_ranks(ranks, as_words(words)))

    return run_on


@pytest.fixture
def run_changed(settings_of, tmp_path):
    """run_changed(change, **settings): a run of two ranks, with six seconds of patience, after change(rank). Returns what
    each of them writes to stderr, and whether both end well."""

    def run_changed(change, **given):
        settings = settings_of(**given, timeout_minutes=0.1)
        files = [tmp_path / f"stderr-{rank}" for rank in range(2)]
        try:
            run_ranks(2, train_changed, change, settings, files)
            ended_well = True
        except AssertionError:
            ended_well = False
        return [file.read_text() for file in files], ended_well

    return run_changed


def train_changed(world, change, settings, files):
    os.dup2(os.open(files[world.rank], os.O_WRONLY | os.O_CREAT), 2)
    world.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(minutes=0.1), dist.group.WORLD)
    run.start_world = lambda **_: world
    change(world.rank)
    run.run_training(settings)


@pytest.mark.slow
def test_any_ranks_and_strategies_in_turn_give_the_losses_of_one_process(
    train_on, tmp_path, metrics_of
):
    """Also from the first step on, and where ranks share sequences; nothing is lost or repeated where another number of
    ranks resumes."""
    train_on(1, tmp_path / "whole", num_steps=8, batch_size=2)
    relay = tmp_path / "relay"
    legs = ((4, "fsdp", 2), (2, "ddp", 1), (3, "fsdp", 3), (1, "none", 1))
    for steps, (ranks, strategy, sharing) in zip((2, 4, 6, 8), legs):
        said = train_on(
            ranks,
            relay,
            num_steps=steps,
            sharding_strategy=strategy,
            context_parallel=sharing,
            batch_size=1,
        )
        assert steps == 2 or f"step {steps - 2}" in said
        assert (
            ranks == 1 or "delaying_rank" in (relay / "metrics.jsonl").read_text().splitlines()[-2]
        )
    whole, parts = (
        [entry["loss"] for entry in metrics_of(run) if "loss" in entry]
        for run in (tmp_path / "whole", relay)
    )
    assert parts == pytest.approx(whole, rel=2e-5)


HYBRID = {  # something of each family of hybrids in one model
    "layers": "mamba1,mamba2/attention+mlp,mlp,gdn+mlp",
    "n_layer": 4,
    "d_ssm": 24,
    "headdim": 8,
    "bcdt_norm_eps": 1e-6,
    "ssm_norm": "before",
    "n_head": 2,
    "n_kv_head": 1,
    "attention_gate": True,
    "qk_norm": "whole",
    "norm_position": "after_attention",
    "rope_scaling": "yarn,factor=4,beta_fast=3,beta_slow=1,attention_factor=1.1,original_max_position_embeddings=16",
    "d_intermediate": 24,
    "mlp_activation": "relu2",
    "multipliers": "embedding=3,residual=0.7,logits=2,ssm_in=1.2,ssm_B=0.5,attention_out=0.8,attention_k=0.6,mlp_out=0.9",
    "reset_at_documents": True,
}


def die_in_step_4(rank, batch_loss=loop.batch_loss):
    batches = []

    def dying(module, batch):
        batches.append(batch)
        if len(batches) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch_loss(module, batch)

    loop.batch_loss = dying


@pytest.mark.slow
@pytest.mark.torch22
def test_hybrids_resume_a_killed_run_to_the_bit(train_on, run_changed, tmp_path, weights_of):
    """On two ranks that share the weights; and with whole weights each they train the same model."""
    steps = {**STEPS, "global_batch_size": 4, **HYBRID}
    train_on(2, tmp_path / "whole", **steps, sharding_strategy="fsdp")
    _, ended_well = run_changed(die_in_step_4, **steps, sharding_strategy="fsdp")
    assert not ended_well
    said = train_on(2, tmp_path / "run", **steps, sharding_strategy="fsdp")
    assert "step_00000002" in said
    whole = weights_of(tmp_path / "whole")
    assert equal(whole, weights_of(tmp_path / "run"))
    train_on(2, tmp_path / "ddp", **steps, sharding_strategy="ddp")
    for name, tensor in weights_of(tmp_path / "ddp").items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-3, atol=1e-4)


def stick_in_step_2(rank, batch_loss=loop.batch_loss):
    steps = []

    def stuck(module, batch):
        if rank == 1 and len(steps) == 1:
            time.sleep(300)
        steps.append(batch)
        return batch_loss(module, batch)

    loop.batch_loss = stuck


def slow_disk(seconds, rank):
    """Rank 1 waits at each piece that it hashes: twenty when it writes, eighteen when it verifies."""

    class Slow:
        def __init__(self):
            self.hash = xxh3_64()
            self.hexdigest = self.hash.hexdigest

        def update(self, data):
            if rank == 1 and len(data) > 1000:
                time.sleep(seconds)
            self.hash.update(data)

    files.xxh3_64 = Slow
    files.BLOCK = files.READ_BLOCK = 8000


@pytest.mark.slow
def test_a_rank_that_waits_in_vain_ends_with_where_it_stands(run_changed):
    """One rank never comes to the next step; the watchdog says where it stands, and the job ends."""
    (_, said), ended_well = run_changed(stick_in_step_2)
    assert not ended_well and "made no progress" in said and "in stuck" in said


@pytest.mark.slow
def test_one_slow_disk_is_no_hang(run_changed):
    """Writing, and verifying at the next start, takes one rank longer than timeout_minutes; the other waits for it."""
    for _ in range(2):
        said, ended_well = run_changed(partial(slow_disk, 0.45), num_steps=1, eval_interval=0)
        assert ended_well, said
