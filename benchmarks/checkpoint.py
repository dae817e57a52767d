"""Measures the time of saving and loading checkpoints, on one or more ranks of this machine:

    torchrun --nproc-per-node=2 -m benchmarks.checkpoint --gib=1 --folder=FOLDER_OF_RUNS

The state (weights and the two moments of the optimizer) has --gib GiB in total, with equal parts on all ranks. It is saved and
loaded in turn with plain reads and writes of the disk, on all ranks at the same time. The table contains the medians over the
rounds of three ratios:

  save     time of `dd conv=fsync` with the same number of bytes, divided by the time of a synchronous save, in which the file
           is written, flushed, read back and committed
  load     time of reading each rank's file, divided by the time of verifying and loading the newest checkpoint, without
           page cache
  stall    seconds for which an asynchronous save delays the updates, divided by the seconds of a synchronous save
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

TENSORS = 24  # the number of weights on each rank
COLUMNS = ("save", "load", "stall")


def main():
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--gib", type=float, default=1.0, help="total size of the state")
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    given = parser.parse_args()
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


class Bench:
    """Measures the times of one machine. Each time is from the common start of all ranks to the end of the last rank."""

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
        """Measures one round. Returns {column: ratio}."""
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
        command = ["dd", "if=/dev/zero", f"of={file}", "bs=1M", f"count={count}", "conv=fsync"]
        subprocess.run(command, check=True, capture_output=True)
        file.unlink()

    def read_over_load(self, files):
        """Returns the ratio of the median times of reading and loading. Both are measured five times in turn, because the rate
        of a disk can change fivefold within a second."""
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
        """Returns the seconds for which a save delays concurrent steps. The second of two saves is measured, because the first
        one allocates buffers."""
        saver = self.checkpointer(asynchronous=True)
        for step in (2, 3):
            saver.wait()
            saver.stall_seconds()
            saver.save(step, self.shards, {})
            while saver.pending:
                writing = self.world.all_reduce_sum(int(saver.is_writing()))
                time.sleep(0.1)  # in place of the next step's forward and backward passes
                saver.wait_for_copies()
                for shard in self.shards:
                    shard.data.mul_(0.999)
                if not writing:
                    saver.poll()
        return saver.stall_seconds()


if __name__ == "__main__":
    main()
