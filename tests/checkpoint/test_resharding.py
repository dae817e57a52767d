import subprocess
from pathlib import Path

import pytest
import torch

from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.folder import load
from mamba_fsdp.checkpoint.tensors import open_tensors
from mamba_fsdp.parallel.world import World, start_world
from tests.support.ranks import build, run_ranks, train, whole

pytestmark = pytest.mark.torch22


def save(world, run, how, steps, asynchronous):
    """Train `steps` from the newest checkpoint or the start, then save. Returns (records, all tensors)."""
    parallel, optimizer = build(world, **how)
    checkpointer = Checkpointer(run, world, asynchronous=asynchronous)
    newest, first = checkpointer.newest(), 0  # verified without shards: all is read again
    if newest:
        first = load(newest, parallel.shards(optimizer), world)["step"]
        parallel.set_optimizer_steps(optimizer, first)
    records = train(world, parallel, optimizer, range(first, first + steps))
    shards = parallel.shards(optimizer)
    checkpointer.save(first + steps, shards, {"step": first + steps, "rank": world.rank})
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
    state = load(Checkpointer(run, world).newest(shards), shards, world)
    parallel.set_optimizer_steps(optimizer, state["step"])
    tensors = whole(world, shards)
    return (
        state,
        tensors,
        train(world, parallel, optimizer, range(state["step"], state["step"] + 2)),
    )


LAYOUTS = [
    (1, {"strategy": "none"}),
    (2, {"strategy": "ddp"}),
    (2, {"strategy": "fsdp"}),
    (3, {"strategy": "fsdp"}),
    (4, {"strategy": "hsdp", "shard_size": 2}),
]


def unbroken(world):
    parallel, optimizer = build(world, strategy="none")
    return train(world, parallel, optimizer, range(4))


@pytest.mark.parametrize(
    "ranks, how, asynchronous",
    [
        (4, {"strategy": "fsdp"}, True),
        (4, {"strategy": "hsdp", "shard_size": 2}, False),
        (4, {"strategy": "ddp"}, True),
    ],
    ids=str,
)
@pytest.mark.slow
def test_any_layout_reads_what_any_layout_saved(run, ranks, how, asynchronous):
    """Model and optimiser come back bit for bit on any number of ranks and any strategy, with rank 0's state, and the
    next losses and gradients are those of one unbroken process."""
    [(first, saved), *_], expected = (
        run_ranks(ranks, save, run, how, 2, asynchronous),
        unbroken(start_world()),
    )
    torch.testing.assert_close(first, expected[:2], rtol=2e-5, atol=2e-5)
    assert len(saved) == 3 * 17 and all(
        tensor.isfinite().all() and tensor.any() for tensor in saved.values()
    )
    for count, other in LAYOUTS:
        for state, tensors, following in run_ranks(count, read, run, other):
            torch.testing.assert_close(following, expected[2:], rtol=2e-5, atol=2e-5)
            assert state == {"step": 2, "rank": 0}
            assert tensors.keys() == saved.keys()
            assert all(torch.equal(tensors[name], saved[name]) for name in saved), (count, other)
    model = open_tensors(run / "checkpoints" / "step_00000002", World.alone())
    assert model.tied == {"lm_head.weight": "backbone.embedding.weight"}
    assert {name for name in saved if not name.startswith("optimizer/")} == model.shapes.keys()
    assert all(torch.equal(model.get(name), saved[name]) for name in model.shapes)


@pytest.mark.slow
@pytest.mark.parametrize("writer, reader", [("pinned", "newest"), ("newest", "pinned")])
def test_each_stack_reads_the_others_checkpoints(run, pythons, writer, reader):
    """torch 2.2 with FSDP1 and the newest torch with FSDP2 read each other's checkpoints bit for bit."""
    script = (
        "import sys; sys.path[:0] = sys.argv[3:]; import torch; from test_resharding import *\n"
        "if __name__ == '__main__':\n"
        "    run, action, how = sys.argv[1], sys.argv[2], {'strategy': 'fsdp'}\n"
        "    work = (save, run, how, 2, True) if action == 'write' else (read, run, how)\n"
        "    [(_, tensors, *_), *_] = run_ranks(2, *work)\n"
        "    torch.save(tensors, run + '.' + action)\n"
    )
    program = run.parent / "program.py"
    program.write_text(script)
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parent / "parallel"), str(here.parent.parent)]
    for stack, action in [(writer, "write"), (reader, "read")]:
        subprocess.run([pythons[stack], str(program), str(run), action, *paths], check=True)
    written, got = (
        torch.load(f"{run}.{action}", weights_only=True) for action in ("write", "read")
    )
    assert written.keys() == got.keys() and all(
        torch.equal(written[name], got[name]) for name in written
    )
