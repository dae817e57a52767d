"""What a checkpoint of very many ranks takes: `python -m benchmarks.checkpoint_scale PRESET [--ranks=1024]`.

Rank 0's own code saves and commits and looks for what to resume from; the other ranks are what they would have told it,
by the arithmetic of fully sharded rows. Files have their sizes and no content; rank 0's calls of the file system are
counted. The seconds of writing and reading are bytes over --throughput (MB/s per TiB; FSx for Lustre offers 125, 250,
500 and 1000) times --tib.
"""

import argparse
import contextlib
import math
import os
import pickle
import tempfile
import time
from collections import Counter
from unittest import mock

import torch

from config.model_config import ModelConfig
from config.presets import preset
from mamba_fsdp.checkpoint import checkpointer as module
from mamba_fsdp.checkpoint import folder
from mamba_fsdp.checkpoint.ranges import packed, part_to_write
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import CPU, World

MODEL_AND_MOMENTS = ("{}", "optimizer/{}/exp_avg", "optimizer/{}/exp_avg_sq")
HASH = {"xxh3": "0" * 16}
CALLS = {name: getattr(os, name) for name in ("stat", "listdir", "mkdir", "rename", "replace", "unlink", "fsync")}
NOTHING = torch.empty(0)


def shards_of(spec, rank, ranks, allocate=False):
    """[(Shard, its count)] of a rank under FSDP2: rows are dealt out evenly, fp32 parameters are whole."""
    shards = []
    for name, parameter in spec.items():
        rows, row = parameter.shape[0], parameter.size // parameter.shape[0]
        share = rows if parameter.fp32 else -(-rows // ranks)
        first = 0 if parameter.fp32 else min(rows, rank * share)
        count = (min(rows, first + share) - first) * row
        data = torch.empty(count) if allocate else NOTHING  # memory that is not touched
        for kind in MODEL_AND_MOMENTS:
            shard = Shard(kind.format(name), tuple(parameter.shape), first * row, data,
                          *((ranks, rank) if parameter.fp32 else (1, 0)))
            shards.append((shard, count))
    return sorted(shards, key=lambda each: each[0].name.startswith("optimizer/"))


class Many(World):
    """Rank 0's view: the other ranks told what `others` has, and sent no complaints."""

    def __init__(self, ranks, others):
        super().__init__(0, ranks, 0, 8, CPU)
        self.others, self.received, self.sent = others, 0, 0

    def gather_on_rank0(self, obj):
        gathered = [obj, *(self.others if isinstance(obj, tuple) else [[]] * (self.size - 1))]
        self.received += sum(len(pickle.dumps(each)) for each in gathered[1:])
        return gathered

    def broadcast_object(self, obj):
        self.sent = max(self.sent, len(pickle.dumps(obj)))
        return obj

    def all_reduce_sum(self, value):
        return value

    def run_local(self, work):
        return work()


@contextlib.contextmanager
def counted(calls):
    with contextlib.ExitStack() as stack:
        for name, original in CALLS.items():
            def call(*given, _name=name, _call=original, **named):
                calls[_name] += 1
                return _call(*given, **named)
            stack.enter_context(mock.patch.object(os, name, call))
        yield


def sparse(path, pieces, *_, **__):
    size = sum(tensor.nbytes for _, _, tensor in pieces)
    with open(path, "wb") as file:
        file.truncate(size)
    return {"bytes": size, **HASH, "model": {"bytes": 0, **HASH}}


def told_by(spec, rank, ranks):
    """(outcome, pieces), as a rank tells them to rank 0."""
    pieces = []
    for turn, (shard, count) in enumerate(shards_of(spec, rank, ranks)):
        start, stop = part_to_write(count, shard.replicas, shard.replica_index, turn)
        pieces.append((shard.start + start, stop - start))
    size = 4 * sum(count for _, count in pieces)
    return {"file": f"rank_{rank:05d}.safetensors", "bytes": size, **HASH, "model": {"bytes": size // 3, **HASH}}, \
        packed(pieces)


def measure(config, ranks):
    """{what: number} of a save, its commit and the choice of what to resume from, on rank 0 of `ranks`."""
    spec = parameters(config)
    others = [told_by(spec, rank, ranks) for rank in range(1, ranks)]
    sizes = [outcome["bytes"] for outcome, _ in others]
    found, saving, resuming = {}, Counter(), Counter()
    with tempfile.TemporaryDirectory() as run, mock.patch.object(module, "write_pieces", sparse):
        world = Many(ranks, others)
        checkpointer = module.Checkpointer(run, world, asynchronous=False, report=lambda sentence: None)
        clean = checkpointer._commit

        def commit(save, told):
            for outcome, _ in others:
                sparse(save.partial / outcome["file"], [("", 0, torch.empty(outcome["bytes"] // 4))])
            began = time.perf_counter()
            path = clean(save, told)
            found["commit_seconds"] = time.perf_counter() - began
            return path
        checkpointer._commit = commit
        with counted(saving):
            checkpointer.save(1, [shard for shard, _ in shards_of(spec, 0, ranks, allocate=True)], {})
        newest = checkpointer.last
        found |= {"told_bytes": world.received, "state_bytes": (newest / "state.json").stat().st_size,
                  "commit_bytes": (newest / "COMMIT").stat().st_size, "files": ranks + 2,
                  "most_bytes": max(sizes),
                  "all_bytes": sum(sizes) + (newest / "rank_00000.safetensors").stat().st_size}
        began, world = time.perf_counter(), Many(ranks, others)
        same = mock.patch.object(folder, "problem_of", lambda path, entry, *how: str(path.stat().st_size)[:0])
        with counted(resuming), same:
            module.Checkpointer(run, world, report=lambda sentence: None).newest()
        content = folder.read_state(newest)
        found |= {"resume_seconds": time.perf_counter() - began, "broadcast_bytes": len(pickle.dumps(content))}
    return {**found, "save_calls": saving, "resume_calls": resuming}


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("preset")
    words.add_argument("--ranks", type=int, default=1024)
    words.add_argument("--throughput", type=int, default=250, help="MB/s per TiB of the shared file system")
    words.add_argument("--tib", type=float, default=100.0, help="its size")
    given = words.parse_args()
    found, rate = measure(ModelConfig(**preset(given.preset)), given.ranks), given.throughput * 1e6 * given.tib
    print(f"{given.preset} on {given.ranks} ranks, fully sharded")
    print(f"{'checkpoint':<40}{found['all_bytes'] / 1e9:>12.1f} GB in {found['files']} files")
    print(f"{'a rank writes and copies at most':<40}{found['most_bytes'] / 1e9:>12.3f} GB, one file")
    print(f"{'all ranks tell rank 0':<40}{found['told_bytes'] / 1e6:>12.3f} MB")
    print(f"{'state.json, COMMIT':<40}{found['state_bytes'] / 1e6:>12.3f} MB, {found['commit_bytes'] / 1e6:.3f} MB")
    print(f"{'rank 0 commits in':<40}{found['commit_seconds']:>12.2f} s beside training")
    print(f"{'rank 0 finds and reads state.json in':<40}{found['resume_seconds']:>12.2f} s, sends "
          f"{found['broadcast_bytes'] / 1e6:.3f} MB to all")
    for name in ("save_calls", "resume_calls"):
        print(f"{'rank 0, ' + name.replace('_', ', '):<40}{sum(found[name].values()):>12} of the file system: "
              + ", ".join(f"{call} {times}" for call, times in found[name].most_common()))
    seconds = math.ceil(found["all_bytes"] / rate)
    print(f"{'writing, or verifying':<40}{seconds:>12} s at {given.throughput} MB/s per TiB, {given.tib:g} TiB")


if __name__ == "__main__":
    main()
