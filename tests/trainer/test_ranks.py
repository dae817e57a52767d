"""The same run on any number of ranks: equal losses, and a checkpoint resumes on other ranks and strategies."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mamba_fsdp.trainer import loop, run
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
            ranks == 1 or "slowest_rank" in (relay / "metrics.jsonl").read_text().splitlines()[-2]
        )
    whole, parts = (
        [entry["loss"] for entry in metrics_of(run) if "loss" in entry]
        for run in (tmp_path / "whole", relay)
    )
    assert parts == pytest.approx(whole, rel=2e-5)


HYBRID = {  # something of each family of hybrids in one model
    "layers": "mamba1,mamba2/attention+mlp,mlp",
    "n_layer": 3,
    "d_ssm": 24,
    "headdim": 8,
    "bcdt_norm_eps": 1e-6,
    "ssm_norm": "before",
    "n_head": 2,
    "n_kv_head": 1,
    "rope_scaling": "yarn,factor=4,beta_fast=3,beta_slow=1,attention_factor=1.1,original_max_position_embeddings=16",
    "d_intermediate": 24,
    "mlp_activation": "relu2",
    "multipliers": "embedding=3,residual=0.7,logits=2,ssm_in=1.2,ssm_B=0.5,attention_out=0.8,attention_k=0.6,mlp_out=0.9",
    "reset_at_documents": True,
}


@pytest.mark.slow
@pytest.mark.torch22
def test_hybrids_train_the_same_model_with_shared_and_with_whole_weights(
    train_on, tmp_path, weights_of
):
    """Also where those that share resume."""
    steps = {**STEPS, "global_batch_size": 4, **HYBRID}
    train_on(2, tmp_path / "ddp", **steps, sharding_strategy="ddp")
    for num_steps in (2, 4):
        parts = {**steps, "num_steps": num_steps, "sharding_strategy": "fsdp"}
        said = train_on(2, tmp_path / "fsdp", **parts)
    assert "step_00000002" in said
    whole = weights_of(tmp_path / "ddp")
    for name, tensor in weights_of(tmp_path / "fsdp").items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-3, atol=1e-4)


def stand_still_in_step_2(world, settings, files):
    os.dup2(os.open(files[world.rank], os.O_WRONLY | os.O_CREAT), 2)
    world.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(minutes=0.1), dist.group.WORLD)
    run.start_world = lambda **_: world
    batch_loss = loop.batch_loss
    steps = []

    def stuck(module, batch):
        if world.rank == 1 and len(steps) == 1:
            time.sleep(300)
        steps.append(batch)
        return batch_loss(module, batch)

    loop.batch_loss = stuck
    run.run_training(settings)


@pytest.mark.slow
def test_a_rank_that_waits_in_vain_ends_with_where_it_stands(settings_of, tmp_path):
    """One rank never comes to the next step; the watchdog says where it stands, and the job ends."""
    files = [tmp_path / f"stderr-{rank}" for rank in range(2)]
    with pytest.raises(AssertionError):
        run_ranks(2, stand_still_in_step_2, settings_of(timeout_minutes=0.1), files)
    said = files[1].read_text()
    assert "made no progress" in said and "in stuck" in said
