"""What saving and loading cost: `python -m benchmarks.checkpoint --gib=1,4 --ranks=1,2`.

State (weights and the optimiser's two moments, as much on each rank) of so many GiB in all is saved and loaded, in
turn with what the disk does by itself, all ranks at once; medians of the rounds, ratios within a round:

  save     `dd conv=fsync` of as many bytes, over a synchronous save (written, flushed, read back, committed)
  cold     reading each rank's file, over finding the newest checkpoint whole and loading it, out of no cache
  warm     the same with the files in the kernel's memory
  stall    seconds for which an asynchronous save held training up, of a synchronous one's; the steps beside it are
           matrix products and an update in place of all the state
  slower   what the steps beside it took longer, for the cores that training and saving share here, of the same
  bytes    of the checkpoint on the disk, over those of weights and moments
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.folder import load
from mamba_fsdp.launch.machine import hold_port
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import start_world

COLUMNS = {
    "save": "save / dd",
    "cold": "load / read, cold",
    "warm": "warm",
    "stall": "stall",
    "slower": "slower",
    "bytes": "bytes",
}
TENSORS = 24  # of weights, on each rank


def main(words=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", default="1,4", help="sizes of all the state")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", help="on the disk to measure, instead of the one of temporary files"
    )
    given = parser.parse_args(words)
    rows = []
    print(
        f"{'GiB':>6} {'ranks':>5} {'dd GiB/s':>9} {'save GiB/s':>11} "
        + " ".join(f"{title:>{max(8, len(title))}}" for title in COLUMNS.values()),
        flush=True,
    )
    for gib in map(float, given.gib.split(",")):
        for ranks in map(int, given.ranks.split(",")):
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                found = on_ranks(ranks, folder, gib, given.rounds)
            rows.append({"gib": gib, "ranks": ranks, **found})
            print(
                f"{gib:>6g} {ranks:>5} {found['dd_rate']:>9.2f} {found['save_rate']:>11.2f} "
                + " ".join(
                    f"{found[name]:>{max(8, len(title))}.1%}" for name, title in COLUMNS.items()
                ),
                flush=True,
            )
    return rows


def on_ranks(ranks, *how):
    """What rank 0 finds."""
    context = multiprocessing.get_context("spawn")
    held = hold_port()
    receiver, sender = context.Pipe(duplex=False)
    processes = [
        context.Process(target=rank_of, args=(rank, ranks, held.getsockname()[1], sender, *how))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    sender.close()
    found = receiver.recv()
    for process in processes:
        process.join()
    return found


def rank_of(rank, ranks, port, sender, folder, gib, rounds):
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    world = start_world()
    found = Measured(world, Path(folder), gib).measure(rounds)
    if rank == 0:
        sender.send(found)
    world.close()


class Measured:
    """One rank. All of them call each method together; seconds are those of the slowest."""

    def __init__(self, world, folder, gib):
        self.world, self.folder = world, folder
        count = int(gib * 2**30 / 4 / 3 / TENSORS / world.size)
        self.state = [torch.randn(count) for _ in range(3 * TENSORS)]
        self.bytes = 4 * count * 3 * TENSORS * world.size
        self.shards = [
            Shard(
                f"{prefix}{number}{suffix}",
                (world.size * count,),
                world.rank * count,
                self.state[kind * TENSORS + number],
            )
            for kind, (prefix, suffix) in enumerate(
                [("w", ""), ("optimizer/w", "/exp_avg"), ("optimizer/w", "/exp_avg_sq")]
            )
            for number in range(TENSORS)
        ]
        self.seconds_of_work = (
            0.5 * gib
        )  # of a step, far less than one of so large a model takes on a CPU

    def measure(self, rounds):
        seen = [self.one_round(number) for number in range(rounds + 1)][
            1:
        ]  # the first takes memory and files
        return {name: statistics.median(one[name] for one in seen) for name in seen[0]}

    def one_round(self, number):
        mine, gib = self.folder / f"plain_{self.world.rank}", self.bytes / 2**30
        blocks = max(1, self.bytes // self.world.size >> 20)
        dd = self.seconds(
            lambda: subprocess.run(
                ["dd", "if=/dev/zero", f"of={mine}", "bs=1M", f"count={blocks}", "conv=fsync"],
                check=True,
                capture_output=True,
            )
        )
        mine.unlink()
        run = self.folder / f"run_{number}"
        saver = Checkpointer(run, self.world, asynchronous=False, report=lambda text: None)
        save = self.seconds(lambda: saver.save(1, self.shards, {}))
        files = sorted((run / "checkpoints/step_00000001").glob("*"))
        on_disk = sum(path.stat().st_size for path in files)
        cold, warm = (
            self.read_over_load(files, run, before)
            for before in (lambda: self.forget(files), lambda: None)
        )
        self.remove(run)
        stall, slower = self.beside(self.folder / f"beside_{number}")
        return {
            "dd_rate": gib / dd,
            "save_rate": gib / save,
            "save": dd / save,
            "cold": cold,
            "warm": warm,
            "stall": stall / save,
            "slower": slower / save,
            "bytes": on_disk / self.bytes,
        }

    def seconds(self, work, before=lambda: None):
        before()
        self.world.barrier()
        began = time.perf_counter()
        work()
        self.world.barrier()
        return time.perf_counter() - began

    def remove(self, run):
        self.world.barrier()
        if self.world.rank == 0:
            shutil.rmtree(run)
        self.world.barrier()

    def forget(self, files):
        for path in files:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read_over_load(self, files, run, before):
        """Medians of both, five times in turn: what a disk reads in a second may be five times what it read before."""
        both = [
            (
                self.seconds(lambda: self.read(files), before),
                self.seconds(lambda: self.load(run), before),
            )
            for _ in range(5)
        ]
        read, load = map(statistics.median, zip(*both, strict=True))
        return read / load

    def read(self, files):
        """This rank's file, into the memory that loading fills."""
        with open(
            [path for path in files if path.suffix == ".safetensors"][self.world.rank],
            "rb",
            buffering=0,
        ) as file:
            file.read(8 + int.from_bytes(file.read(8), "little") - 8)
            for tensor in self.state:
                rest = memoryview(tensor.view(torch.uint8).numpy())
                while len(rest):
                    rest = rest[file.readinto(rest) :]

    def load(self, run):
        newest = Checkpointer(run, self.world, report=lambda text: None).newest(self.shards)
        load(newest, self.shards, self.world)

    def beside(self, run):
        """(seconds that one save held this rank up, seconds that its steps took longer beside it)."""
        saver = Checkpointer(run, self.world, report=lambda text: None)
        usual = statistics.median(self.step(saver) for _ in range(3))
        saver.save(1, self.shards, {})  # takes the buffers that the next one finds
        saver.wait()
        saver.stall_seconds()
        saver.save(2, self.shards, {})
        took = [self.step(saver)]
        while self.world.all_reduce_sum(int(bool(saver.pending))):
            took.append(self.step(saver))
        stalled = saver.stall_seconds()
        self.remove(run)
        return stalled, max(0.0, sum(took) - usual * len(took) - stalled)

    def step(self, saver):
        """Seconds of a step: work that reads, then an update of all the state; the rest is as in train/loop.py."""
        began = time.perf_counter()
        matrix = torch.randn(512, 512)
        while time.perf_counter() - began < self.seconds_of_work:
            matrix = (matrix @ matrix).tanh()
        writing = self.world.all_reduce_sum(int(saver.is_writing()))
        saver.wait_for_copies()
        torch._foreach_mul_(self.state, 0.999)
        self.world.barrier()  # who waits here waits for the other's step, as the next one would, and not for its save
        if not writing:
            saver.settle()
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
