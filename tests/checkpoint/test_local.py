"""The local tier: ranks as those of several nodes, each with a folder for its disk."""

import os
import shutil
from dataclasses import replace

import pytest
import torch
from ranks import build, run_ranks, whole

from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.folder import load
from mamba_fsdp.errors import UserError

pytestmark = pytest.mark.torch22


def on_nodes(world, per_node, disks):
    """The world as that of nodes with so many ranks each; $DISK is the folder of this rank's node."""
    os.environ["DISK"] = str(disks[world.rank // per_node])
    return replace(world, local_rank=world.rank % per_node, local_size=per_node)


def opened(world, run, said, per_node, disks, strategy, path="$DISK"):
    world = on_nodes(world, per_node, disks)
    parallel, optimizer = build(world, strategy, shard_size=2 if strategy == "hsdp" else None)
    return (Checkpointer(run, world, report=said.append, local_path=path), parallel,
            lambda: parallel.shards() + parallel.optimizer_shards(optimizer))


def save(world, run, steps, *how):
    """Saves the model with `step` in all weights; shared ones of the steps that a hundred divides."""
    said = []
    checkpointer, _, shards = opened(world, run, said, *how)
    for step in steps:
        for number, shard in enumerate(shards()):
            shard.data.copy_(shard.start + torch.arange(shard.data.numel()) + 1000 * number + step)
        checkpointer.save(step, shards(), {"step": step}, step % 100 > 0)
        checkpointer.wait()
    return said


def resume(world, run, *how):
    """(the step that is resumed, whether all its weights are as saved, what rank 0 said)."""
    said = []
    checkpointer, parallel, shards = opened(world, run, said, *how)
    found = checkpointer.to_resume(shards)
    if not found:
        return None, True, said
    step = load(found, shards(), checkpointer.world)["step"]
    same = [torch.equal(shard.data, shard.start + torch.arange(shard.data.numel()) + 1000. * number + step)
            for number, shard in enumerate(shards())]
    return step, all(same), said


@pytest.fixture
def disks(tmp_path):
    disks = [tmp_path / f"disk{number}" for number in range(4)]
    for disk in disks:
        disk.mkdir()
    return disks


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp", "ddp"])
def test_a(run, disks, strategy):
    said = run_ranks(4, save, run, (100, 102, 104), 2, disks, strategy)
    print(said)
    print(sorted(str(p.relative_to(run.parent)) for p in run.parent.rglob("*")))
    print(run_ranks(4, resume, run, 2, disks, strategy))
    shutil.rmtree(disks[0])
    print(run_ranks(4, resume, run, 2, disks, strategy))
    shutil.rmtree(disks[0])
    print(run_ranks(4, resume, run, 2, [disks[1], disks[0]], strategy))
    print(run_ranks(2, resume, run, 1, [disks[1], disks[0]], strategy))
