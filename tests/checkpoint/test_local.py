"""The local tier: ranks as those of several nodes, each with a folder for its disk."""

import os
import pickle
import shutil
import threading
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import build, run_ranks

from mamba_fsdp.checkpoint import checkpointer, retention
from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.files import PieceReader
from mamba_fsdp.checkpoint.folder import load
from mamba_fsdp.checkpoint.local import LocalTier
from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run_layout import committed

pytestmark = pytest.mark.torch22


def opened(world, run, said, per_node, disks, strategy="fsdp"):
    """The run's Checkpointer, and what gives its shards, in a world of nodes with so many ranks each."""
    if disks:
        os.environ["DISK"] = str(disks[world.rank // per_node])
    world = replace(world, local_rank=world.rank % per_node, local_size=per_node)
    parallel, optimizer = build(world, strategy, shard_size=2 if strategy == "hsdp" else None)
    return (
        Checkpointer(run, world, report=said.append, local_path="$DISK/local"),
        lambda: parallel.shards(optimizer),
    )


def values(number, shard, step):
    return shard.start + torch.arange(shard.data.numel()) + 1000.0 * number + step


def save(world, run, steps, *how):
    """Saves a model, other values at each step; where a hundred divides the step, in the run folder."""
    said = []
    checkpointer, shards = opened(world, run, said, *how)
    for step in steps:
        for number, shard in enumerate(shards()):
            shard.data.copy_(values(number, shard, step))
        checkpointer.save(step, shards(), {"step": step}, step % 100 > 0)
        checkpointer.wait()
    return said


def resume(world, run, *how):
    """(the step that is resumed, or what is wrong; what rank 0 said after the line that there is a local tier)."""
    said = []
    try:
        checkpointer, shards = opened(world, run, said, *how)
        filled = shards()
        found = checkpointer.to_resume(filled)
    except UserError as error:
        return str(error), said
    if not found:
        return None, said[1:]
    step = load(found, filled, checkpointer.world)["step"]
    assert all(
        torch.equal(shard.data, values(number, shard, step))
        for number, shard in enumerate(shards())
    )
    return step, said[1:]


@pytest.fixture
def disks(tmp_path):
    for number in range(3):
        (tmp_path / f"disk{number}").mkdir()
    return sorted(tmp_path.glob("disk*"))


def steps_on(disk):
    return sorted(path.name for path in disk.glob("local/*/*/*"))


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "hsdp", "ddp"])
def test_a_run_resumes_from_a_local_checkpoint_on_other_nodes_and_fewer_ranks(run, disks, strategy):
    """Two nodes of two ranks. One disk is lost, the other node comes first; then one rank on the node that is left."""
    assert run_ranks(4, save, run, (100, 102, 104, 106), 2, disks, strategy)[0][1:] == [
        "checkpoint step_00000100 is committed"
    ]
    for disk in disks[:2]:  # the newest two, with the files of both nodes
        assert steps_on(disk) == ["step_00000104", "step_00000106"]
        assert len(list(disk.glob("local/*/*/step_00000106/rank_*"))) == 4
    shutil.rmtree(disks[0])
    disks[0].mkdir()
    assert run_ranks(4, resume, run, 2, [disks[1], disks[0]], strategy) == [(106, [])] * 4
    copied = sorted(path.name for path in disks[0].glob("local/*/*/step_00000106/rank_*"))
    # What is whole on all ranks under FSDP lies in the first.
    assert copied == [
        f"rank_0000{rank}.safetensors" for rank in ((0, 2, 3) if strategy == "fsdp" else range(4))
    ]
    shutil.rmtree(disks[0])
    assert run_ranks(1, resume, run, 1, [disks[1]], "none", launched=False) == [(106, [])]


@pytest.mark.slow
def test_a_broken_file_is_taken_from_its_copy_and_without_one_an_older_checkpoint_is_taken(
    run, disks
):
    """A node's file, then its copy too; then all that is local: the shared one is used, each time with a line."""
    run_ranks(2, save, run, (100, 102, 104), 1, disks)
    newest = [next(disk.glob("local/*/*/step_00000104")) for disk in disks[:2]]
    flip(newest[0] / "rank_00000.safetensors")
    (step, said), _ = run_ranks(2, resume, run, 1, disks)
    assert (
        step == 104
        and "the content of rank_00000.safetensors has changed" in said[0]
        and len(said) == 1
    )
    assert run_ranks(2, resume, run, 1, disks)[0] == (104, [])  # mended
    for folder in newest:
        flip(folder / "rank_00000.safetensors")
    (step, said), _ = run_ranks(2, resume, run, 1, disks)
    assert step == 102 and said[-2:] == [
        "warning: the local checkpoint of step 104 is passed over: rank_00000.safetensors is whole on no node",
        "warning: the local checkpoint of step 104 is not whole on these nodes",
    ]
    for disk in disks[:2]:
        assert steps_on(disk) == ["step_00000102"]  # 104 is to be taken anew
        shutil.rmtree(disk / "local")
    (step, said), _ = run_ranks(2, resume, run, 1, disks)
    assert step == 100 and said == [
        "warning: the local checkpoint of step 104 is not whole on these nodes"
    ]


@pytest.mark.slow
def test_a_local_checkpoint_is_used_where_newer_shared_ones_are_broken(run, disks):
    run_ranks(2, save, run, (102, 200), 1, disks)
    flip(run / "checkpoints/step_00000200/rank_00001.safetensors")
    (step, said), _ = run_ranks(2, resume, run, 1, disks)
    assert step == 102 and "step_00000200 is broken and passed over" in said[0]
    shutil.rmtree(disks[0])
    shutil.rmtree(disks[1])
    disks[0].mkdir(), disks[1].mkdir()
    (wrong, _), _ = run_ranks(2, resume, run, 1, disks)
    assert "are whole" in wrong or "is whole" in wrong


def test_verifying_a_local_checkpoint_fills_the_shards(run, disks, monkeypatch):
    """Nothing is read twice, nor is anything left of one that is passed over."""
    monkeypatch.setenv("DISK", str(disks[0]))
    save(World.alone(), run, (101, 102), 1, [], "none")
    monkeypatch.setattr(PieceReader, "read", None)
    assert resume(World.alone(), run, 1, [], "none") == (102, [])
    flip(next(disks[0].glob("local/*/*/step_00000102/rank*")))
    assert resume(World.alone(), run, 1, [], "none")[0] == 101
    flip(next(disks[0].glob("local/*/*/step_00000101/rank*")))
    checkpointer, shards = opened(World.alone(), run, [], 1, [], "none")
    filled = shards()
    filled[0].data.fill_(7.0)
    assert checkpointer.to_resume(filled) is None and not any(shard.data.any() for shard in filled)


def save_in_trouble(world, run, disks, kind):
    """As save, (100, 102), where one node has trouble with its disk: (what was said, its local folder)."""
    said = []
    checkpointer, shards = opened(world, run, said, 1, disks)
    if world.rank == 1:
        from mamba_fsdp.checkpoint import checkpointer as module

        def full(path, *more, clean=module.write_pieces, **how):
            if kind == "own":
                raise OSError(28, "No space left on device", str(path))
            (path.parent / "rank_00000.safetensors").mkdir()  # where the copy is to come
            return clean(path, *more, **how)

        module.write_pieces = full
    for step in (102, 104):
        checkpointer.save(step, shards(), {}, True)
        checkpointer.wait()
    return said[1:], sorted(os.listdir(checkpointer.local.folder))


@pytest.mark.parametrize("kind", ["own", "copy"])
def test_a_full_disk_is_a_line_and_training_continues(run, disks, kind):
    """What a node can't write of its own ends the local checkpoint, on all nodes; without a copy it still counts."""
    (said, there), (_, there_too) = run_ranks(2, save_in_trouble, run, disks, kind)
    assert len(said) == (2 if kind == "own" else 1) and there == there_too
    if kind == "own":
        assert (
            "can't be saved, training continues" in said[0]
            and "No space left" in said[0]
            and not there
        )
    else:
        assert "have no copy on the next node" in said[0] and there == [
            "step_00000102",
            "step_00000104",
        ]


@pytest.mark.parametrize("where, what", [(checkpointer, "write_pieces"), (retention, "move")])
def test_a_local_disk_that_hangs_holds_up_no_shared_checkpoint(
    run, disks, monkeypatch, where, what
):
    """While a file is written or a checkpoint gets its name. Local ones are left out meanwhile, with a line; what hung
    is whole in the end."""
    hanging, hangs, said, clean = threading.Event(), threading.Event(), [], getattr(where, what)

    def hang(path, *rest, **how):
        if not path.is_relative_to(run):
            hanging.set()
            assert hangs.wait(600)
        return clean(path, *rest, **how)

    monkeypatch.setattr(where, what, hang)
    checkpoints, shards = opened(World.alone(), run, said, 1, disks, "none")
    before = [shard.data.clone() for shard in shards()]
    checkpoints.save(101, shards(), {"step": 101}, True)
    checkpoints.wait_for_copies()
    for shard in shards():
        shard.data.add_(1.0)
    while not hanging.wait(0.01):
        if not checkpoints.is_writing(True):
            checkpoints.settle(True)
    checkpoints.save(200, shards(), {"step": 200})
    checkpoints.wait((False,))
    assert [path.name for path in committed(run / "checkpoints")] == ["step_00000200"]
    monkeypatch.setattr(checkpointer, "SECONDS_OF_SILENCE", 0)
    for step in (202, 204):
        checkpoints.save(step, shards(), {"step": step}, True)
    checkpoints.wait()
    (told,) = [line for line in said if "made no progress" in line]
    assert told.startswith(
        "warning: the local checkpoint of step 101 is still being written: rank 0 on"
    )
    monkeypatch.setattr(checkpointer, "SECONDS_OF_SILENCE", 600)
    hangs.set()
    checkpoints.wait()
    assert steps_on(disks[0]) == ["step_00000101"] and not checkpoints.pending
    load(next(disks[0].glob("local/*/*/step_00000101")), shards(), World.alone())
    assert all(torch.equal(shard.data, value) for shard, value in zip(shards(), before))


def refused(_, run, disks, per_node):
    said = []
    with pytest.raises(UserError) as wrong:
        opened(_, run, said, per_node, disks)
    return str(wrong.value)


def test_one_folder_for_several_nodes_is_refused(run, disks):
    first, second = run_ranks(2, refused, run, [disks[0], disks[0]], 1)
    assert first == second and "is one folder for several nodes" in first


@pytest.mark.parametrize(
    "path, wrong",
    [
        ("{}/nowhere/there", "nowhere/there: No such file"),
        ("$NO_SUCH_VARIABLE/local", "this variable is not set on"),
    ],
)
def test_a_path_that_is_not_there_is_refused(run, tmp_path, path, wrong):
    with pytest.raises(UserError, match=wrong):
        Checkpointer(run, World.alone(), local_path=path.format(tmp_path))


def test_a_single_node_has_no_copies_and_another_run_of_the_same_path_is_not_resumed(
    run, disks, monkeypatch
):
    monkeypatch.setenv("DISK", str(disks[0]))
    assert save(World.alone(), run, (101, 102), 1, [], "none")[0].endswith("one node: no copies")
    (disks[0] / "local" / os.listdir(disks[0] / "local")[0] / ".left").mkdir()
    assert resume(World.alone(), run, 1, [], "none") == (102, [])
    shutil.rmtree(run)
    found, (said,) = resume(World.alone(), run, 1, [], "none")
    assert found is None and said.endswith(
        f"GB of local checkpoints removed, unfinished or of earlier runs in {run}"
    )
    assert not steps_on(disks[0]) and len(list(disks[0].glob("local/*/*"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["COMMIT", "state.json"])
def test_what_is_cut_short_or_odd_on_a_node_is_passed_over(run, disks, name):
    """On one node the other's serves; on both an older checkpoint."""
    run_ranks(2, save, run, (102, 104), 1, disks)
    newest = [next(disk.glob("local/*/*/step_00000104")) for disk in disks[:2]]
    (newest[0] / name).write_text('{"files": {"../../x": 1, "state.json": []}, "version": 3}')
    assert run_ranks(2, resume, run, 1, disks)[0] == (104, [])
    (newest[0] / name).write_text("")
    os.truncate(newest[1] / name, 100)
    step, said = run_ranks(2, resume, run, 1, disks)[0]
    assert step == 102 and "step 104 is not whole" in said[0]


def test_ranks_tell_little_of_a_thousand_nodes_files():
    """What goes over rank 0 is linear in the ranks: a few bytes of each, and a row for each file that a node lacks."""
    told = {}
    for ranks in (64, 1024):
        tier, names = (
            LocalTier.__new__(LocalTier),
            np.array([f"rank_{rank:05d}.safetensors" for rank in range(ranks)]),
        )
        tier.nodes, flags = ranks // 8, np.zeros((ranks, 2, ranks), bool)
        for rank in range(
            8, ranks
        ):  # node 0 is new; each file is on two nodes, looked at by one rank
            flags[rank, 0, [rank, rank - 8]] = True
        for rank in range(ranks):
            flags[rank, 1, [0, rank]] = True  # file 0 has what is whole on all ranks
        sent = [zlib.compress(np.packbits(mine, axis=1).tobytes()) for mine in flags]
        flags[ranks - 1, 0, :8] = True
        transfers = tier._transfers(names, sent)
        assert [row for row in transfers if row[1] == 0] == [(1, 0, number) for number in range(8)]
        assert len(transfers) == 8 + ranks // 8 - 2
        told[ranks] = sum(map(len, sent)) + len(pickle.dumps(transfers))
    assert told[1024] < 1.5 * 16 * told[64]
