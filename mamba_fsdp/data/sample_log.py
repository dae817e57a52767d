"""Which windows each step took, so that `audit` can prove it: samples.jsonl in the run folder, written by rank 0.

    {"step": 40, "logged": true, "ranks": 4, "global_batch": 8, "position": {...}}    a start, which resumes from 40
    {"step": 41, "draws": {"code": [13, 16], "text": [19, 24]}, "read": "9c5e..."}    draws 13, 14 of code ...

The position is what `Order.state_after` gives. "read" is no arithmetic of the order: it is the sum of `fingerprint`
over the windows in the batches that all ranks were handed.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mamba_fsdp.data.loader import Batch, Loader
from mamba_fsdp.data.order import source_key, splitmix64
from mamba_fsdp.report.records import Log

LINES = 100  # written at once: opening a file takes a round trip on a network file system


def fingerprint(name: str, windows: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each window (n,) of a source: (n,) uint64. Sums modulo 2**64 tell multisets of windows apart."""
    return splitmix64(np.uint64(source_key("windows", name)), windows)


def read_by(batches: Iterable[Batch]) -> int:
    """The sum of the fingerprints of what these batches hold, modulo 2**64."""
    windows: dict[str, list] = {}
    for batch in batches:
        for name, window in batch.samples:
            windows.setdefault(name, []).append(window)
    return sum(int(fingerprint(name, np.array(which)).sum()) for name, which in windows.items()) % (1 << 64)


class SampleLog:
    """The log of a start that resumes from `step`. logged: whether steps will be; False where a former start's log must
    say that this one's are missing."""

    def __init__(self, path: Path, step: int, loader: Loader, *, logged: bool) -> None:
        self.log, self.order, self.batch, self.logged = Log(path, step), loader.order, loader.split.global_batch, logged
        self.first_step, self.drawn = step, loader.order.drawn
        self.waiting = [{"step": step, "logged": logged, "ranks": loader.split.world_size, "global_batch": self.batch,
                         "position": loader.state_before(step)}]

    def add(self, step: int, read: int) -> None:
        """After each step. read: see `read_by`, of all ranks."""
        if self.logged:
            start = self.drawn
            self.drawn = start + self.order.counts_of((step - 1 - self.first_step) * self.batch, self.batch)
            ranges = zip(self.order.names, start.tolist(), self.drawn.tolist())
            self.waiting.append({"step": step, "draws": {name: [first, end] for name, first, end in ranges
                                                         if end > first}, "read": f"{read:016x}"})
            if len(self.waiting) >= LINES:
                self.write()

    def write(self) -> None:
        """Raises UserError as `Log.write` does."""
        self.log.write(*self.waiting)
        self.waiting = []

    def sync(self) -> None:
        """Returns when all steps so far are on the disk."""
        self.write()
        self.log.sync()
