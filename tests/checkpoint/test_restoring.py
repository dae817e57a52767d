"""Tests that a checkpoint can be loaded with another number of ranks, another strategy or another version of torch,
and how many bytes the ranks read."""

import os
import shutil
import subprocess

import pytest
import torch

from mamba_fsdp.checkpoint import ranges
from mamba_fsdp.checkpoint.restore import find_checkpoint
from mamba_fsdp.checkpoint.tensors import CheckpointTensors
from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.world import World
from tests.support.checkpoints import assume_verified, flip, open_run, quiet
from tests.support.compare import equal
from tests.support.ranks import build, run_ranks, train, whole

pytestmark = pytest.mark.torch22


def save(world, run, how, asynchronous):
    """Trains two steps, saves a checkpoint, and returns the saved tensors."""
    parallel, optimizer = build(world, **how)
    train(world, parallel, optimizer, range(2))
    shards = parallel.shards(optimizer)
    checkpointer = open_run(run, world, asynchronous=asynchronous)
    checkpointer.save(2, shards, {"step": 2, "rank": world.rank})
    tensors = whole(world, shards)
    checkpointer.wait_for_copies()
    for shard in shards:
        shard.data.zero_()  # does not affect an asynchronous save, which has its own copy
    checkpointer.wait()
    return tensors


def read(world, run, how):
    """Loads a checkpoint into a new model with the settings `how`, and returns (state, tensors)."""
    parallel, optimizer = build(world, **how)
    shards = parallel.shards(optimizer)
    for shard in shards:
        shard.data.fill_(-1.0)
    whole_checkpoint = open_run(run, world).resume(shards)
    return whole_checkpoint.contents.state, whole(world, shards)


SAVES = [
    ({"strategy": "fsdp"}, True),
    ({"strategy": "hsdp", "shard_size": 2}, False),
    ({"strategy": "ddp", "optimizer": "muon"}, True),
]
LAYOUTS = {  # {number of ranks: the settings of `build` with which these ranks load a checkpoint}
    1: [{"strategy": "none"}],
    3: [{"strategy": "ddp"}, {"strategy": "fsdp"}],
    4: [{"strategy": "hsdp", "shard_size": 2}],
}


def save_each(world, run):
    ranges.MIN_PIECE_SIZE = 8  # otherwise these tensors are too small to be divided among replicas
    return [save(world, run / str(number), *how) for number, how in enumerate(SAVES)]


def read_each(world, run, layouts):
    """Loads each save with each layout. Returns [(index of the save, layout, result of `read`)]."""
    found = []
    for number, (how, _) in enumerate(SAVES):
        for layout in layouts:
            like_saved = {**layout, "optimizer": how.get("optimizer", "adamw")}
            found.append((number, layout, read(world, run / str(number), like_saved)))
    return found


@pytest.mark.slow
def test_every_layout_can_load_the_checkpoints_of_every_layout(run):
    """Model and optimizer are restored bitwise, whatever the number of ranks and the strategy of the save and of the
    load. All ranks get the state that rank 0 saved."""
    saves, *_ = run_ranks(4, save_each, run)
    for number, saved in enumerate(saves):
        model = CheckpointTensors(assume_verified(run / str(number) / "checkpoints/step_00000002"))
        assert {name for name in saved if not name.startswith("optimizer/")} == model.shapes.keys()
        for name in model.shapes:
            assert torch.equal(model.get(name), saved[name])
            assert torch.equal(model.slice(name, 3, 9), saved[name].flatten()[3:9])
    for count, layouts in LAYOUTS.items():
        for found in run_ranks(count, read_each, run, layouts):
            for number, layout, (state, tensors) in found:
                assert state == {"step": 2, "rank": 0}
                assert equal(tensors, saves[number]), (SAVES[number], count, layout)


PROGRAM = """
import sys
from pathlib import Path
import torch
from tests.checkpoint.test_restoring import SHARDED, read, run_ranks, save
if __name__ == "__main__":
    theirs, ours = map(Path, sys.argv[1:])
    torch.save(run_ranks(2, read, theirs, SHARDED)[0][1], f"{theirs}.read")
    torch.save(run_ranks(2, save, ours, SHARDED, True)[0], f"{ours}.saved")
"""
SHARDED = {"strategy": "fsdp"}


@pytest.mark.slow
@pytest.mark.pinned
def test_each_stack_reads_the_others_checkpoints(run, pythons, project):
    """Checkpoints of torch 2.2 with FSDP1 are restored bitwise by the newest torch with FSDP2, and vice versa."""
    program = run.parent / "program.py"
    program.write_text(PROGRAM)
    pinned = run / "pinned"
    newest = run / "newest"
    saved = run_ranks(2, save, pinned, SHARDED, True)[0]
    command = [pythons["newest"], program, pinned, newest]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(project)})
    assert equal(saved, torch.load(f"{pinned}.read", weights_only=True))
    saved = torch.load(f"{newest}.saved", weights_only=True)
    assert equal(saved, run_ranks(2, read, newest, SHARDED)[0][1])


def count_reads(world, run):
    """Returns the number of bytes that this process reads while it resumes."""
    parallel, optimizer = build(world, strategy="fsdp")
    shards = parallel.shards(optimizer)
    checkpointer = open_run(run, world)
    before = bytes_read()
    checkpointer.resume(shards)
    return bytes_read() - before


def bytes_read():
    return int(open("/proc/self/io").readline().split()[1])  # the first line is "rchar: BYTES"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the folder of a run that three ranks trained with FSDP, with a checkpoint of step 2."""
    run = tmp_path_factory.mktemp("saved")
    run_ranks(3, save, run, SHARDED, True)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 2])
def test_ranks_share_the_reading(saved, ranks):
    """The ranks divide the verification of a checkpoint: together they read each byte once.

    A rank reads an element of its shards again only if another rank has verified it. All ranks together therefore read
    less than twice the size of the checkpoint.
    """
    read = sum(run_ranks(ranks, count_reads, saved))
    whole = sum(path.stat().st_size for path in (saved / "checkpoints/step_00000002").iterdir())
    assert whole < read < 2 * whole


@pytest.mark.slow
def test_only_model_verifies_only_the_weights(saved, run):
    """With only_model=True, find_checkpoint verifies only the weights: a damaged optimizer moment is accepted, and a
    damaged weight is an error."""
    shutil.copytree(saved, run)
    path = run / "checkpoints/step_00000002/rank_00001.safetensors"
    flip(path)
    assert find_checkpoint(run, World.alone(), only_model=True).path == path.parent
    flip(path, at=5000)
    with pytest.raises(UserError, match="none of the checkpoints .* content of rank_00001"):
        find_checkpoint(run, World.alone(), report=quiet, only_model=True)
