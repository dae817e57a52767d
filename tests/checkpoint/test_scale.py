"""What a checkpoint of very many ranks takes: bytes that each tells rank 0, bytes of state.json, open files."""

import math
import os
import pickle
import resource

import numpy as np
import pytest
import torch

from benchmarks import checkpoint
from benchmarks.checkpoint_scale import measure
from mamba_fsdp.checkpoint.checkpointer import RankFile, Save
from mamba_fsdp.checkpoint.contents import Checksum, FileChecksum, StoredTensor, read_contents
from mamba_fsdp.checkpoint.files import write_pieces
from mamba_fsdp.checkpoint.folder import Reader
from mamba_fsdp.checkpoint.ranges import pack, part_to_write
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.parallel.world import start_world
from tests.support.checkpoints import open_run
from tests.support.ranks import run_ranks

# Of a Mamba-1 block of 2.8b: some parameters that are sharded, in their order, and one that is whole on all ranks.
SHARDED = {"norm": (2560,), "in_proj": (10240, 2560), "x_proj": (192, 5120), "dt_proj": (5120, 160)}
SHAPES = {**SHARDED, "A_log": (5120, 16)}
RANKS = 1024


def by_rows(name, count):
    """(starts, counts) of what FSDP2 gives to each of `count` ranks."""
    first, *rest = SHARDED[name]
    edges = np.minimum(np.arange(count + 1) * -(-first // count), first) * math.prod(rest)
    return edges[:-1], np.diff(edges)


def flattened(name, count):
    """The same of FSDP1, which cuts the block as one flat tensor."""
    sizes = {other: math.prod(shape) for other, shape in SHARDED.items()}
    offset = sum(list(sizes.values())[: list(sizes).index(name)])
    length = -(-sum(sizes.values()) // count)
    edges = np.clip(np.arange(count + 1) * length - offset, 0, sizes[name])
    return edges[:-1], np.diff(edges)


def pieces_of_all(names, cut, shard_size):
    """[rank, tensor] -> (start, count) of what it writes."""
    pieces = np.zeros((RANKS, len(names), 2), dtype=np.int64)
    for turn, name in enumerate(names):
        kind = name.split("/")[-1]
        starts, counts, replicas = [0], [math.prod(SHAPES[kind])], RANKS
        if kind in SHARDED:
            starts, counts = cut(kind, shard_size)
            replicas = RANKS // shard_size
        for rank in range(RANKS):
            shard, index = rank % len(starts), rank // len(starts)
            start, stop = part_to_write(int(counts[shard]), replicas, index, turn)
            pieces[rank, turn] = starts[shard] + start, stop - start
    return pieces


def commit(run, tensors, files):
    """The committed checkpoint of these RankFiles, whose files are there."""
    checkpointer = open_run(run)
    folder = checkpointer.lease.own / "step_00000001"
    folder.mkdir()
    files = files(folder) if callable(files) else files
    return checkpointer._commit(Save(1, folder, {}, tensors), files)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut, shard_size",
    [(by_rows, RANKS), (by_rows, 8), (flattened, RANKS)],
    ids=["fsdp", "hsdp", "fsdp1"],
)
def test_a_thousand_ranks_tell_little_of_a_thousand_tensors(run, cut, shard_size):
    """How a tensor is cut is told once for all that are cut alike; each rank tells what it wrote without names."""
    kinds = ("model/", "optimizer/exp_avg/", "optimizer/exp_avg_sq/")
    names = [f"{kind}{layer}/{name}" for kind in kinds for layer in range(66) for name in SHAPES]
    checksum = FileChecksum(10**9, "0123456789abcdef", Checksum(10**9, "0123456789abcdef"))
    pieces = pieces_of_all(names, cut, shard_size)
    told = [
        RankFile(pack(mine), f"rank_{rank:05d}.safetensors", checksum)
        for rank, mine in enumerate(pieces)
    ]
    assert max(len(pickle.dumps(mine)) for mine in told) < 4000
    tensors = {name: StoredTensor(SHAPES[name.split("/")[-1]], "F32", 0) for name in names}
    contents = read_contents(commit(run, tensors, told))
    assert (run / "checkpoints/step_00000001/state.json").stat().st_size < 400_000
    for number in range(0, len(names), 41):
        ranges = contents.ranges[contents.tensors[names[number]].ranges]
        writers = np.flatnonzero(pieces[:, number, 1])
        expected = sorted((int(pieces[rank, number, 0]), int(rank)) for rank in writers)
        assert list(zip(ranges.starts, ranges.files, strict=True)) == expected


def read_with_few_files(_, checkpoint):
    """(soft limit after a start, tensors read) where no more files may be open than the checkpoint has."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, highest + 30))
    start_world()
    reader = Reader(checkpoint, read_contents(checkpoint))
    tensors = [reader.read(name, 0, 120).tolist() for name in ("model/a", "model/b", "model/a")]
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - highest, tensors


def test_a_checkpoint_may_have_more_files_than_a_process_may_open(run):
    def write_files(folder):
        files = []
        for rank in range(40):
            part = torch.arange(3 * rank, 3 * rank + 3.0)
            pieces = [("model/a", 3 * rank, part), ("model/b", 3 * rank, -part)]
            name = f"rank_{rank:05d}.safetensors"
            checksum = write_pieces(folder / name, pieces, 2)
            files.append(RankFile(pack([(3 * rank, 3)] * 2), name, checksum))
        return files

    tensors = {name: StoredTensor([120], "F32", 0) for name in ("model/a", "model/b")}
    checkpoint = commit(run, tensors, write_files)
    whole = torch.arange(120.0)
    ((soft, tensors),) = run_ranks(1, read_with_few_files, checkpoint, launched=False)
    assert soft == 30 and tensors == [whole.tolist(), (-whole).tolist(), whole.tolist()]


@pytest.mark.slow
def test_rank_0_makes_as_many_calls_among_a_thousand_ranks_as_among_64():
    """And what it is told, writes and sends is linear in the ranks."""
    few, many = (measure(ModelConfig(d_model=64, n_layer=2), ranks) for ranks in (64, RANKS))
    for calls in ("save_calls", "start_calls"):
        assert 0 < few[calls] == many[calls] < 25
    for what in ("told_bytes", "state_bytes", "commit_bytes", "sent_bytes"):
        assert many[what] < 1.5 * RANKS / 64 * few[what], what


@pytest.mark.slow
def test_the_benchmark_gives_numbers_that_can_be(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    row = checkpoint.main(["--gib=0.02", "--rounds=1", f"--folder={tmp_path}"])
    assert row and all(0 < value < math.inf for value in row.values())
    assert f"{row['save']:.1%}" in capsys.readouterr().out and not list(tmp_path.iterdir())
