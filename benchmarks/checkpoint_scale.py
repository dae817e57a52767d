"""Measures the cost of a checkpoint for many ranks: `python -m benchmarks.checkpoint_scale PRESET [--ranks=1024]`.

The code of rank 0 saves and commits a checkpoint, and finds it again. The other ranks are replaced by the reports that they
would send if the parameters were split by rows over all ranks. The files have the right sizes but no content.
"""

import math
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch

from benchmarks.measure import command_line, table
from mamba_fsdp.checkpoint import checkpointer as module
from mamba_fsdp.checkpoint import restore
from mamba_fsdp.checkpoint.checkpointer import Checkpointer, RankFile
from mamba_fsdp.checkpoint.contents import Checksum, FileChecksum, read_contents
from mamba_fsdp.checkpoint.files import FileRead
from mamba_fsdp.checkpoint.ranges import pack_ranges, range_to_write
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.presets import preset
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import CPU, World
from mamba_fsdp.run.names import STATE
from mamba_fsdp.trainer.run_folder import RunFolder

KINDS = ("{}", "optimizer/{}/exp_avg", "optimizer/{}/exp_avg_sq")
XXH3 = "0" * 16


def shards_of(spec, rank, ranks):
    """Returns [(Shard without data, number of its elements)] of a rank under FSDP2: rows are split evenly over the ranks, but
    fp32 parameters are replicated."""
    shards = []
    for kind in KINDS:
        for name, parameter in spec.items():
            rows = parameter.shape[0]
            row = parameter.size // rows
            share = rows if parameter.fp32 else -(-rows // ranks)
            first = 0 if parameter.fp32 else min(rows, rank * share)
            count = (min(rows, first + share) - first) * row
            replicas = (ranks, rank) if parameter.fp32 else (1, 0)
            data = torch.empty(0)
            shard = Shard(kind.format(name), tuple(parameter.shape), first * row, data, *replicas)
            shards.append((shard, count))
    return shards


def file_of(spec, rank, ranks):
    """Returns the report of a rank to rank 0."""
    pieces = []
    for turn, (shard, count) in enumerate(shards_of(spec, rank, ranks)):
        start, stop = range_to_write(count, shard.replicas, shard.replica_index, turn)
        pieces.append((shard.start + start, stop - start))
    size = 4 * sum(count for _, count in pieces)
    checksum = FileChecksum(size, XXH3, Checksum(size // 3, XXH3))
    return RankFile(pack_ranges(pieces), f"rank_{rank:05d}.safetensors", checksum)


class Many(World):
    """The world as seen from rank 0. others: the reports of the other ranks, which do not exist."""

    def __init__(self, others):
        super().__init__(0, len(others) + 1, 8, CPU)
        self.others = others

    def gather_on_rank0(self, obj):
        if isinstance(obj, RankFile):
            return [obj, *self.others]
        return [obj, *[[]] * (self.size - 1)]

    def broadcast_object(self, obj):
        return obj

    def all_reduce_sum(self, value):
        return value

    def run_local(self, work, *inputs):
        return work(*inputs)


def measure(config, ranks):
    """Measures how rank 0 of `ranks` ranks saves and commits a checkpoint, and how it finds the checkpoint again. Returns
    {name: number}."""
    spec = parameters(config)
    others = [file_of(spec, rank, ranks) for rank in range(1, ranks)]
    own = file_of(spec, 0, ranks)
    calls = Counter()
    with tempfile.TemporaryDirectory() as run:

        def write(path, *_):
            for file in (own, *others):
                with open(path.with_name(file.name), "wb") as sparse:
                    sparse.truncate(file.checksum.bytes)
            calls.clear()
            return own.checksum

        def count(event, arguments):
            if threading.current_thread().name == "lease":
                return  # this thread renews the lease at any time
            if event in ("open", "os.listdir", "os.scandir", "os.rename", "os.mkdir"):
                calls[event] += str(arguments[0]).startswith(run)

        sys.addaudithook(count)
        world = Many(others)
        folder = RunFolder(run)
        folder.acquire()
        checkpointer = Checkpointer(
            run, world, folder.lease, asynchronous=False, report=lambda text: None
        )
        shards = []
        for shard, elements in shards_of(spec, 0, ranks):
            shards.append(replace(shard, data=torch.zeros(elements)))
        began = time.perf_counter()
        # Sparse files do not take disk space.
        room = mock.patch.object(shutil, "disk_usage", lambda _: SimpleNamespace(free=math.inf))
        with mock.patch.object(module, "write_pieces", write), room:
            checkpointer.save(1, shards, {})
        newest = checkpointer.last
        found = {"commit_seconds": time.perf_counter() - began, "save_calls": sum(calls.values())}
        calls.clear()
        began = time.perf_counter()
        real = restore.hash_file

        def hash_small(path, *rest):
            return real(path, *rest) if path.name == STATE else FileRead(XXH3, {})

        with mock.patch.object(restore, "hash_file", hash_small):
            restore.find_checkpoint(checkpointer.folder.parent, world)
        folder.lease.close()
        contents = read_contents(newest)
        return found | {
            "start_seconds": time.perf_counter() - began,
            "start_calls": sum(calls.values()),
            "told_bytes": sum(len(pickle.dumps(file)) for file in others),
            "sent_bytes": len(pickle.dumps(contents)),
            "state_bytes": (newest / STATE).stat().st_size,
            "commit_bytes": (newest / "COMMIT").stat().st_size,
            "most_bytes": max(file.checksum.bytes for file in others),
            "all_bytes": sum(file.checksum.bytes for file in (own, *others)),
        }


def main():
    parser = command_line(__doc__)
    parser.add_argument("preset")
    parser.add_argument("--ranks", type=int, default=1024)
    given = parser.parse_args()
    found = measure(ModelConfig(**preset(given.preset)), given.ranks)
    print(f"{given.preset} on {given.ranks} ranks, fully sharded, in {given.ranks + 2} files")
    print(table({"name": name, "value": f"{value:,.3f}"} for name, value in found.items()))


if __name__ == "__main__":
    main()
