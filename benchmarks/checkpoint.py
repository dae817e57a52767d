"""Measures what saving and loading cost, on one or more ranks of this machine:

    torchrun --nproc-per-node=2 -m benchmarks.checkpoint --gib=1 --folder=FOLDER_OF_RUNS

State (weights and the optimiser's two moments, as much on each rank) of so many GiB in all is saved and loaded, in
turn with what the disk does by itself, on all ranks at once; medians of the rounds, ratios within a round:

  save     `dd conv=fsync` of as many bytes, over a synchronous save (written, flushed, read back, committed)
  load     reading each rank's file, over finding the newest checkpoint whole and loading it, from an empty cache
  stall    seconds for which an asynchronous save held the updates up, over the seconds of a synchronous save
"""

import os
import shutil
import statistics
import subprocess
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.measure import command_line, in_turn, table
from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import start_world
from mamba_fsdp.trainer.run_folder import RunFolder

TENSORS = 24  # of weights, on each rank
COLUMNS = ("save", "load", "stall")


def main(words=None):
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--gib", type=float, default=1.0, help="all the state")
    parser.add_argument("--folder", default=".", help="on the disk to measure")
    given = parser.parse_args(words)
    world = start_world()
    torch.set_num_threads(1)
    run = world.broadcast_object(Path(given.folder, f".checkpoint_{os.getpid()}"))
    bench = Bench(world, run, given.gib)
    rounds = [bench.measure() for _ in range(given.rounds)]
    found = {name: statistics.median(one[name] for one in rounds) for name in COLUMNS}
    if world.rank == 0:
        row = {"GiB": f"{given.gib:g}", "ranks": world.size}
        print(table([row | {name: f"{share:.1%}" for name, share in found.items()}]))
    world.close()
    return found


class Bench:
    """The times of one machine, each from when all ranks begin to when the last has ended."""

    def __init__(self, world, run, gib):
        self.world = world
        self.run = run
        self.bytes = int(gib * 2**30)
        count = self.bytes // 4 // 3 // TENSORS // world.size
        self.shards = []
        for kind in ("{}", "optimizer/{}/exp_avg", "optimizer/{}/exp_avg_sq"):
            for number in range(TENSORS):
                name = kind.format(f"tensor_{number:02}")
                shape = (world.size * count,)
                data = torch.randn(count)
                self.shards.append(Shard(name, shape, world.rank * count, data))

    def seconds(self, work):
        self.world.barrier()
        began = time.perf_counter()
        work()
        self.world.barrier()
        return time.perf_counter() - began

    def measure(self):
        """Measures one round. Returns {column: its value}."""
        dd = self.seconds(self.write_with_dd)
        folder = RunFolder(self.run)
        self.world.on_rank0(folder.acquire)
        self.lease = folder.lease
        saver = self.checkpointer(asynchronous=False)
        save = self.seconds(lambda: saver.save(1, self.shards, {}))
        found = {
            "save": dd / save,
            "load": self.read_over_load(sorted(saver.last.iterdir())),
            "stall": self.stall() / save,
        }
        folder.lease.close()
        self.world.barrier()
        if self.world.rank == 0:
            shutil.rmtree(self.run)
        self.world.barrier()
        return found

    def checkpointer(self, asynchronous):
        return Checkpointer(
            self.run, self.world, self.lease, asynchronous=asynchronous, report=lambda text: None
        )

    def write_with_dd(self):
        file = self.run.with_name(f"{self.run.name}_{self.world.rank}")
        count = max(1, self.bytes // self.world.size >> 20)
        words = ["dd", "if=/dev/zero", f"of={file}", "bs=1M", f"count={count}", "conv=fsync"]
        subprocess.run(words, check=True, capture_output=True)
        file.unlink()

    def read_over_load(self, files):
        """Returns the ratio of both, five times in turn: a disk's rate may change fivefold within a second."""
        own = files[0].parent / f"rank_{self.world.rank:05}.safetensors"
        buffer = bytearray(own.stat().st_size)

        def read_own():
            with open(own, "rb", buffering=0) as file:
                file.readinto(buffer)

        def resume():
            self.checkpointer(asynchronous=True).resume(self.shards)

        def seconds(work):
            self.forget(files)
            return self.seconds(work)

        works = {"read": partial(seconds, read_own), "load": partial(seconds, resume)}
        taken = in_turn(works, 5)
        return statistics.median(taken["read"]) / statistics.median(taken["load"])

    def forget(self, files):
        for path in files:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def stall(self):
        """Returns the seconds for which a save held up concurrent steps: the second save, which finds its buffers."""
        saver = self.checkpointer(asynchronous=True)
        for step in (2, 3):
            saver.wait()
            saver.stall_seconds()
            saver.save(step, self.shards, {})
            while saver.pending:
                writing = self.world.all_reduce_sum(int(saver.is_writing()))
                time.sleep(0.1)  # the next step's forward and backward passes
                saver.wait_for_copies()
                for shard in self.shards:
                    shard.data.mul_(0.999)
                if not writing:
                    saver.poll()
        return saver.stall_seconds()


if __name__ == "__main__":
    main()
