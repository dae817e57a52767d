"""What a checkpoint of very many ranks takes: bytes that each tells rank 0, bytes of state.json, open files."""

import math
import os
import pickle
import resource

import numpy as np
import pytest
import torch

from benchmarks.checkpoint_scale import measure
from config.model_config import ModelConfig
from mamba_fsdp.checkpoint.checkpointer import Checkpointer, Save
from mamba_fsdp.checkpoint.files import write_pieces
from mamba_fsdp.checkpoint.folder import Reader
from mamba_fsdp.checkpoint.ranges import packed, part_to_write
from mamba_fsdp.parallel.world import World, start_world
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch22

# A Mamba-1 block of 2.8b: its parameters that are sharded, in their order, and those that are whole on all ranks.
BLOCK = {
    "norm": (2560,),
    "in_proj": (10240, 2560),
    "conv1d.weight": (5120, 1, 4),
    "conv1d.bias": (5120,),
    "x_proj": (192, 5120),
    "dt_proj.weight": (5120, 160),
    "dt_proj.bias": (5120,),
    "out_proj": (2560, 5120),
}
WHOLE = {"A_log": (5120, 16), "D": (5120,)}
NAMES = [
    f"{kind}{layer}/{name}"
    for kind in ("model/", "optimizer/exp_avg/", "optimizer/exp_avg_sq/")
    for layer in range(33)
    for name in (*BLOCK, *WHOLE)
]
RANKS = 1024


def rows(name, count):
    """(starts, counts) of what FSDP2 gives to each of `count` ranks."""
    first, *rest = BLOCK[name]
    edges = np.minimum(np.arange(count + 1) * -(-first // count), first) * math.prod(rest)
    return edges[:-1], np.diff(edges)


def flattened(name, count):
    """The same of FSDP1, which cuts the block as one flat tensor."""
    before = list(BLOCK)[: list(BLOCK).index(name)]
    offset, size = sum(math.prod(BLOCK[other]) for other in before), math.prod(BLOCK[name])
    length = -(-sum(map(math.prod, BLOCK.values())) // count)
    edges = np.clip(np.arange(count + 1) * length - offset, 0, size)
    return edges[:-1], np.diff(edges)


def pieces_of_all(cut, shard_size):
    """[rank, tensor] -> (start, count) of what it writes."""
    replicas, pieces = RANKS // shard_size, np.zeros((RANKS, len(NAMES), 2), dtype=np.int64)
    for turn, name in enumerate(NAMES):
        kind = name.split("/")[-1]
        if kind in WHOLE:
            there = np.array(
                [part_to_write(math.prod(WHOLE[kind]), RANKS, rank, turn) for rank in range(RANKS)]
            )
            pieces[:, turn] = np.stack([there[:, 0], there[:, 1] - there[:, 0]], axis=1)
        elif replicas == 1:
            pieces[:, turn] = np.stack(cut(kind, RANKS), axis=1)
        else:
            starts, counts = cut(kind, shard_size)
            for shard, (start, count) in enumerate(zip(starts.tolist(), counts.tolist())):
                there = np.array(
                    [part_to_write(count, replicas, index, turn) for index in range(replicas)]
                )
                pieces[shard::shard_size, turn] = np.stack(
                    [start + there[:, 0], there[:, 1] - there[:, 0]], axis=1
                )
    return pieces


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut, shard_size", [(rows, RANKS), (rows, 8), (flattened, RANKS)], ids=["fsdp", "hsdp", "fsdp1"]
)
def test_a_thousand_ranks_tell_little_of_a_thousand_tensors(run, cut, shard_size):
    """How a tensor is cut is told once for all that are cut alike; each rank tells what it wrote without names."""
    written = {
        "bytes": 10**9,
        "xxh3": "0123456789abcdef",
        "model": {"bytes": 10**8, "xxh3": "0123456789abcdef"},
    }
    pieces = pieces_of_all(cut, shard_size)
    told = [
        ({"file": f"rank_{rank:05d}.safetensors", **written}, packed(mine))
        for rank, mine in enumerate(pieces)
    ]
    assert max(len(pickle.dumps(mine)) for mine in told) < 4000

    checkpointer, partial = (
        Checkpointer(run, World.alone()),
        run / "checkpoints/.step_00000001.abc.partial",
    )
    partial.mkdir()
    tensors = {
        name: {"shape": (BLOCK | WHOLE)[name.split("/")[-1]], "dtype": "F32", "tied": []}
        for name in NAMES
    }
    checkpoint = checkpointer._commit(Save(1, partial, {}, tensors, b""), told)
    assert (checkpoint / "state.json").stat().st_size < 400_000

    reader = Reader(checkpoint)
    for number in range(0, len(NAMES), 41):
        name, there = NAMES[number], pieces[:, number]
        found = [
            (file, start, count)
            for file, start, _, _, count in reader.where(name, 0, math.prod(tensors[name]["shape"]))
        ]
        assert found == [
            (f"rank_{rank:05d}.safetensors", start, count)
            for start, count, rank in sorted(
                (*there[rank], rank) for rank in np.flatnonzero(there[:, 1])
            )
        ]


def read_with_few_files(_, checkpoint):
    """(soft limit after a start, tensors read) where no more files may be open than the checkpoint has."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, highest + 30))
    start_world()
    reader = Reader(checkpoint)
    tensors = [reader.read(name, 0, 120) for name in ("model/a", "model/b") for _ in range(2)]
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - highest, [
        tensor.tolist() for tensor in tensors
    ]


def test_a_checkpoint_may_have_more_files_than_a_process_may_open(run):
    checkpointer, partial = (
        Checkpointer(run, World.alone()),
        run / "checkpoints/.step_00000001.abc.partial",
    )
    partial.mkdir()
    told = []
    for rank in range(40):
        part = torch.arange(3 * rank, 3 * rank + 3.0)
        pieces = [("model/a", 3 * rank, part), ("model/b", 3 * rank, -part)]
        file = f"rank_{rank:05d}.safetensors"
        told.append(
            ({"file": file, **write_pieces(partial / file, pieces, 2)}, packed([(3 * rank, 3)] * 2))
        )
    tensors = {
        name: {"shape": (120,), "dtype": "F32", "tied": []} for name in ("model/a", "model/b")
    }
    checkpoint = checkpointer._commit(Save(1, partial, {}, tensors, b""), told)
    whole = torch.arange(120.0).tolist()
    ((soft, tensors),) = run_ranks(1, read_with_few_files, checkpoint, launched=False)
    assert soft == 30 and tensors == [whole] * 2 + [[-value for value in whole]] * 2


@pytest.mark.slow
def test_a_rank_makes_as_many_calls_among_a_thousand_ranks_as_among_64():
    """Rank 0 lists a folder once, no other does, and what it is told, writes and sends is linear in the ranks."""
    few, many = (measure(ModelConfig(d_model=64, n_layer=2), ranks) for ranks in (64, RANKS))
    for calls in ("save_calls", "resume_calls", "last_save_calls", "last_resume_calls"):
        assert few[calls] == many[calls], calls
    assert many["save_calls"]["listdir"] == many["resume_calls"]["listdir"] == 1
    assert (
        many["last_save_calls"] == {"open": 3, "fsync": 2}
        and sum(many["resume_calls"].values()) < 25
    )
    assert (
        many["last_resume_calls"].keys() == {"stat", "open"}
        and sum(many["last_resume_calls"].values()) < 5
    )
    for what in ("told_bytes", "state_bytes", "commit_bytes", "broadcast_bytes"):
        assert many[what] < 1.5 * RANKS / 64 * few[what], what
