"""What comes back on other ranks, under other strategies and on the other stack; and who reads how much for that."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections import Counter

import pytest
import torch

from mamba_fsdp.checkpoint import files, folder
from mamba_fsdp.checkpoint.restore import find_checkpoint
from mamba_fsdp.checkpoint.tensors import CheckpointTensors
from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.world import World, start_world
from tests.support.checkpoints import as_whole, flip, open_run, quiet
from tests.support.compare import equal
from tests.support.ranks import build, run_ranks, train, whole

pytestmark = pytest.mark.torch22


def save(world, run, how, asynchronous):
    """Trains two steps, then saves. Returns (records, all tensors)."""
    parallel, optimizer = build(world, **how)
    records = train(world, parallel, optimizer, range(2))
    shards = parallel.shards(optimizer)
    checkpointer = open_run(run, world, asynchronous=asynchronous)
    checkpointer.save(2, shards, {"step": 2, "rank": world.rank})
    tensors = whole(world, shards)
    checkpointer.wait_for_copies()
    for shard in shards:
        shard.data.zero_()  # an asynchronous save holds copies by now
    checkpointer.wait()
    return records, tensors


def read(world, run, how):
    """What a fresh model of another layout holds after loading, and (loss, gradient norm) of the next two steps."""
    parallel, optimizer = build(world, **how)
    shards = parallel.shards(optimizer)
    for shard in shards:
        shard.data.fill_(-1.0)
    state = open_run(run, world).resume(shards).contents.state
    parallel.set_optimizer_steps(optimizer, state["step"])
    tensors = whole(world, shards)
    return state, tensors, train(world, parallel, optimizer, range(2, 4))


SAVES = [
    ({"strategy": "fsdp"}, True),
    ({"strategy": "hsdp", "shard_size": 2}, False),
    ({"strategy": "ddp", "optimizer": "muon"}, True),
]
LAYOUTS = {  # number of ranks: how they read
    1: [{"strategy": "none"}],
    3: [{"strategy": "ddp"}, {"strategy": "fsdp"}],
    4: [{"strategy": "hsdp", "shard_size": 2}],
}


def save_each(world, run):
    return [save(world, run / str(number), *how) for number, how in enumerate(SAVES)]


def read_each(world, run, layouts):
    """[(number of the save, layout, what `read` gives)]"""
    found = []
    for number, (how, _) in enumerate(SAVES):
        for layout in layouts:
            like_saved = {**layout, "optimizer": how.get("optimizer", "adamw")}
            found.append((number, layout, read(world, run / str(number), like_saved)))
    return found


def unbroken(kind):
    parallel, optimizer = build(start_world(), strategy="none", optimizer=kind)
    return train(start_world(), parallel, optimizer, range(4))


@pytest.mark.slow
def test_any_layout_reads_what_any_layout_saved(run):
    """Model and optimiser come back bit for bit on any number of ranks and any strategy, with rank 0's state, and the
    next losses and gradients are those of one unbroken process."""
    saves, *_ = run_ranks(4, save_each, run)
    expected = [unbroken(how.get("optimizer", "adamw")) for how, _ in SAVES]
    for number, (first, saved) in enumerate(saves):
        torch.testing.assert_close(first, expected[number][:2], rtol=2e-5, atol=2e-5)
        assert len(saved) == 3 * 32 - (12 if "optimizer" in SAVES[number][0] else 0)
        assert all(tensor.isfinite().all() and tensor.any() for tensor in saved.values())
        model = CheckpointTensors(as_whole(run / str(number) / "checkpoints/step_00000002"))
        assert {name for name in saved if not name.startswith("optimizer/")} == model.shapes.keys()
        for name in model.shapes:
            assert torch.equal(model.get(name), saved[name])
            assert torch.equal(model.slice(name, 3, 9), saved[name].flatten()[3:9])
    for count, layouts in LAYOUTS.items():
        for found in run_ranks(count, read_each, run, layouts):
            for number, layout, (state, tensors, following) in found:
                torch.testing.assert_close(following, expected[number][2:], rtol=2e-5, atol=2e-5)
                assert state == {"step": 2, "rank": 0}
                assert equal(tensors, saves[number][1]), (SAVES[number], count, layout)


PROGRAM = """
import sys
from pathlib import Path
import torch
from tests.checkpoint.test_restoring import SHARDED, read, run_ranks, save
if __name__ == "__main__":
    theirs, ours = map(Path, sys.argv[1:])
    torch.save(run_ranks(2, read, theirs, SHARDED)[0][1], f"{theirs}.read")
    torch.save(run_ranks(2, save, ours, SHARDED, True)[0][1], f"{ours}.saved")
"""
SHARDED = {"strategy": "fsdp"}


@pytest.mark.slow
@pytest.mark.pinned
def test_each_stack_reads_the_others_checkpoints(run, pythons, project):
    """torch 2.2 with FSDP1 and the newest torch with FSDP2 read each other's checkpoints bit for bit."""
    program = run.parent / "program.py"
    program.write_text(PROGRAM)
    pinned = run / "pinned"
    newest = run / "newest"
    saved = run_ranks(2, save, pinned, SHARDED, True)[0][1]
    words = [pythons["newest"], program, pinned, newest]
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": str(project)})
    assert equal(saved, torch.load(f"{pinned}.read", weights_only=True))
    saved = torch.load(f"{newest}.saved", weights_only=True)
    assert equal(saved, run_ranks(2, read, newest, SHARDED)[0][1])


def count_reads(world, run):
    """(bytes of files read while verifying, read again afterwards, files of JSON opened, bytes of the rank's shards)."""
    read_bytes = Counter()
    opened = []

    def counting(reader):
        class Counted(io.FileIO):
            def readinto(self, buffer):
                count = super().readinto(buffer)
                read_bytes[reader] += count
                return count

        return Counted

    def note(event, arguments):
        if event == "open" and str(arguments[0]).endswith(("COMMIT", "state.json")):
            opened.append(arguments[0])

    files.FileIO = counting("verify")
    folder.FileIO = counting("load")
    sys.addaudithook(note)
    parallel, optimizer = build(world, strategy="fsdp")
    shards = parallel.shards(optimizer)
    open_run(run, world).resume(shards)
    held = sum(shard.data.nbytes for shard in shards)
    return read_bytes["verify"], read_bytes["load"], len(opened), held


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run folder to which three ranks have saved step 2 under FSDP."""
    run = tmp_path_factory.mktemp("saved")
    run_ranks(3, save, run, SHARDED, True)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 2])
def test_each_byte_is_read_once_and_again_only_by_who_holds_it(saved, ranks):
    """All ranks together read each byte once, and what lies in other files than a rank has verified once more: on as many
    ranks as have saved, only what all of them hold. Rank 0 reads COMMIT and state.json for all."""
    results = run_ranks(ranks, count_reads, saved)
    commit = json.loads((saved / "checkpoints/step_00000002/COMMIT").read_text())["files"]
    verified, again, _, held = (sum(column) for column in zip(*results, strict=True))
    headers = verified - sum(entry["bytes"] for entry in commit.values())
    assert 0 < headers < 3 * 20_000  # which say where the pieces lie, and are verified
    assert again < (0.5 if ranks == 3 else 1.0) * held
    of_rank_0, *of_others = [opened for _, _, opened, _ in results]
    assert 0 < of_rank_0 < 5 and sum(of_others) <= 1  # which verifies state.json, as any other file


@pytest.mark.slow
def test_who_wants_the_weights_alone_demands_that_they_are_whole_and_no_more(saved, run):
    """A broken moment does not matter; a broken weight is refused, but to who wants the state alone."""
    shutil.copytree(saved, run)
    path = run / "checkpoints/step_00000002/rank_00001.safetensors"
    flip(path)
    assert find_checkpoint(run, World.alone(), part="model").path == path.parent
    flip(path, at=5000)
    assert find_checkpoint(run, World.alone(), part="state").path == path.parent
    with pytest.raises(UserError, match="none of the checkpoints .* content of rank_00001"):
        find_checkpoint(run, World.alone(), report=quiet, part="model")
