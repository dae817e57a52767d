"""What a checkpoint of very many ranks takes: `python -m benchmarks.checkpoint_scale PRESET [--ranks=1024]`.

Rank 0's own code saves and commits and looks for what to resume from; the other ranks are what they would have told it,
by the arithmetic of fully sharded rows. Files have their sizes and no content. Then the last rank's own code does its
part, with rank 0's answers and a file of a few bytes (each further 256 MiB of a real one are one more fsync). What both
call of the file system is counted. The seconds of writing and reading are bytes over --throughput (MB/s per TiB; FSx
for Lustre offers 125, 250, 500 and 1000) times --tib.
"""

import argparse
import contextlib
import math
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from unittest import mock

import torch

from config.model_config import ModelConfig
from config.presets import preset
from mamba_fsdp.checkpoint import checkpointer as module
from mamba_fsdp.checkpoint import folder
from mamba_fsdp.checkpoint.files import write_pieces
from mamba_fsdp.checkpoint.ranges import packed, part_to_write
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import CPU, World

MODEL_AND_MOMENTS = ("{}", "optimizer/{}/exp_avg", "optimizer/{}/exp_avg_sq")
HASH = {"xxh3": "0" * 16}
CALLS = {
    name: getattr(os, name)
    for name in ("stat", "listdir", "mkdir", "rename", "replace", "unlink", "fsync")
}
NOTHING = torch.empty(0)
counting: list[tuple[str, Counter]] = []  # (folder, what is called in it) while it is counted


def count_opened(event, given):
    if event == "open" and counting and str(given[0]).startswith(counting[-1][0]):
        counting[-1][1]["open"] += 1


sys.addaudithook(count_opened)


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
            shard = Shard(
                kind.format(name),
                tuple(parameter.shape),
                first * row,
                data,
                *((ranks, rank) if parameter.fp32 else (1, 0)),
            )
            shards.append((shard, count))
    return sorted(shards, key=lambda each: each[0].name.startswith("optimizer/"))


class Many(World):
    """Rank 0's view: the other ranks told what `others` has, and sent no complaints."""

    def __init__(self, ranks, others):
        super().__init__(0, ranks, 0, 8, CPU)
        self.others, self.received, self.sent, self.said = others, 0, 0, []

    def gather_on_rank0(self, obj):
        gathered = [obj, *(self.others if isinstance(obj, tuple) else [[]] * (self.size - 1))]
        self.received += sum(len(pickle.dumps(each)) for each in gathered[1:])
        return gathered

    def broadcast_object(self, obj):
        self.sent = max(self.sent, len(pickle.dumps(obj)))
        self.said.append(obj)
        return obj

    def all_reduce_sum(self, value):
        return value

    def run_local(self, work):
        return work()


class Last(Many):
    """The last rank's view: rank 0 says what it said before."""

    def __init__(self, first):
        super().__init__(first.size, [])
        self.rank, self.heard = first.size - 1, iter(first.said)

    def gather_on_rank0(self, obj):
        return []

    def broadcast_object(self, obj):
        return next(self.heard)


@contextlib.contextmanager
def counted(calls, run):
    with contextlib.ExitStack() as stack:
        counting.append((run, calls))
        stack.callback(counting.pop)
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
    return {
        "file": f"rank_{rank:05d}.safetensors",
        "bytes": size,
        **HASH,
        "model": {"bytes": size // 3, **HASH},
    }, packed(pieces)


def measure(config, ranks):
    """{what: number} of a save, its commit and the choice of what to resume from, on rank 0 of `ranks`."""
    spec = parameters(config)
    others = [told_by(spec, rank, ranks) for rank in range(1, ranks)]
    sizes = [outcome["bytes"] for outcome, _ in others]
    found, calls = {}, {name: Counter() for name in ("save", "resume", "last_save", "last_resume")}
    with tempfile.TemporaryDirectory() as run, mock.patch.object(module, "write_pieces", sparse):
        world = Many(ranks, others)
        checkpointer = module.Checkpointer(
            run, world, asynchronous=False, report=lambda sentence: None
        )
        clean = checkpointer._commit

        def commit(save, told):
            with counted(Counter(), run):  # these calls are not rank 0's
                for outcome, _ in others:
                    sparse(
                        save.partial / outcome["file"],
                        [("", 0, torch.empty(outcome["bytes"] // 4))],
                    )
            found["partial"] = save.partial
            began = time.perf_counter()
            path = clean(save, told)
            found["commit_seconds"] = time.perf_counter() - began
            return path

        checkpointer._commit = commit
        with counted(calls["save"], run):
            checkpointer.save(
                1, [shard for shard, _ in shards_of(spec, 0, ranks, allocate=True)], {}
            )
        newest = checkpointer.last
        found |= {
            "told_bytes": world.received,
            "state_bytes": (newest / "state.json").stat().st_size,
            "commit_bytes": (newest / "COMMIT").stat().st_size,
            "files": ranks + 2,
            "most_bytes": max(sizes),
            "all_bytes": sum(sizes) + (newest / "rank_00000.safetensors").stat().st_size,
        }
        found["partial"].mkdir()  # it has another name by now
        with mock.patch.object(module, "write_pieces", write_pieces):
            last = module.Checkpointer(run, Last(world), asynchronous=False)
            with counted(calls["last_save"], run):
                last.save(
                    1,
                    [
                        replace(shard, data=torch.zeros(min(1, count)))
                        for shard, count in shards_of(spec, ranks - 1, ranks)
                    ],
                    {},
                )
        shutil.rmtree(found["partial"])
        began, world = time.perf_counter(), Many(ranks, others)
        with mock.patch.object(folder, "checksum", lambda path, *_: open(path).close() or HASH):
            with counted(calls["resume"], run):
                module.Checkpointer(run, world, report=lambda sentence: None).newest()
                content = world.on_rank0(lambda: folder.read_state(newest))
            found |= {
                "resume_seconds": time.perf_counter() - began,
                "broadcast_bytes": len(pickle.dumps(content)),
            }
            with counted(calls["last_resume"], run):
                last = Last(world)
                module.Checkpointer(run, last).newest()
                last.on_rank0(lambda: None)
    return {**found, **{f"{name}_calls": counter for name, counter in calls.items()}}


def main():
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("preset")
    words.add_argument("--ranks", type=int, default=1024)
    words.add_argument(
        "--throughput", type=int, default=250, help="MB/s per TiB of the shared file system"
    )
    words.add_argument("--tib", type=float, default=100.0, help="its size")
    given = words.parse_args()
    found, rate = (
        measure(ModelConfig(**preset(given.preset)), given.ranks),
        given.throughput * 1e6 * given.tib,
    )
    print(f"{given.preset} on {given.ranks} ranks, fully sharded")
    print(f"{'checkpoint':<40}{found['all_bytes'] / 1e9:>12.1f} GB in {found['files']} files")
    print(
        f"{'a rank writes and copies at most':<40}{found['most_bytes'] / 1e9:>12.3f} GB, one file"
    )
    print(f"{'all ranks tell rank 0':<40}{found['told_bytes'] / 1e6:>12.3f} MB")
    print(
        f"{'state.json, COMMIT':<40}{found['state_bytes'] / 1e6:>12.3f} MB, {found['commit_bytes'] / 1e6:.3f} MB"
    )
    print(f"{'rank 0 commits in':<40}{found['commit_seconds']:>12.2f} s beside training")
    print(
        f"{'rank 0 finds and reads state.json in':<40}{found['resume_seconds']:>12.2f} s, sends "
        f"{found['broadcast_bytes'] / 1e6:.3f} MB to all"
    )
    for name, who in (
        ("save", "rank 0, a save"),
        ("last_save", "any other rank, a save"),
        ("resume", "rank 0, a start"),
        ("last_resume", "any other rank, a start"),
    ):
        calls = found[f"{name}_calls"]
        print(
            f"{who:<40}{sum(calls.values()):>12} calls of the file system: "
            + ", ".join(f"{call} {times}" for call, times in calls.most_common())
        )
    seconds = math.ceil(found["all_bytes"] / rate)
    print(
        f"{'writing, or verifying':<40}{seconds:>12} s at {given.throughput} MB/s per TiB, {given.tib:g} TiB"
    )


if __name__ == "__main__":
    main()
