"""Seconds per training step since the last report, and how the ranks compare."""

import contextlib
import resource
import statistics
import time
from collections.abc import Iterator

import torch


class Clock:
    """Times training steps from `step` on; validation, saving and committing a checkpoint do not
    count.

    A rank's own seconds run from when it knows a step's sums, which all do together, to its next
    forward pass: report, data."""

    def __init__(self, step: int, ranks: int = 1) -> None:
        now = time.perf_counter()
        self.began = now
        self.first_step = step
        self.interval_began = now  # at the last report
        self.interval_step = step
        self.together = now  # when all ranks last knew the sums of a step
        self.own = [0.0] * ranks  # seconds of each since the last report
        self.data_wait = 0.0  # seconds since then
        self.told = 0.0  # seconds of steps that new_seconds has returned

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The time spent inside does not count."""
        before = time.perf_counter()
        yield
        seconds = time.perf_counter() - before
        self.began += seconds
        self.interval_began += seconds
        self.together += seconds

    def new_seconds(self) -> float:
        """Of steps, since this was last asked."""
        before = self.told
        self.told = time.perf_counter() - self.began
        return self.told - before

    def own_seconds(self) -> float:
        """This rank's, at its next forward pass."""
        return time.perf_counter() - self.together

    def meet(self, own_seconds: list[float]) -> None:
        """Call when all ranks know a step's sums. own_seconds: of each rank before it."""
        self.own = [before + seconds for before, seconds in zip(self.own, own_seconds)]
        self.together = time.perf_counter()

    def seconds_per_step(self, step: int) -> tuple[float, list[float]]:
        """Means since the last report: (in all, each rank's own)."""
        steps = max(1, step - self.interval_step)
        in_all = time.perf_counter() - self.interval_began
        return in_all / steps, [seconds / steps for seconds in self.own]

    def next_interval(self, step: int) -> None:
        self.interval_began = time.perf_counter()
        self.interval_step = step
        self.own = [0.0] * len(self.own)
        self.data_wait = 0.0

    def mean_seconds(self, step: int) -> float | None:
        """Returns the seconds of a step since the start; None before the first one has ended."""
        done = step - self.first_step
        if not done:
            return None
        return (time.perf_counter() - self.began) / done


def stragglers(own_seconds: list[float]) -> dict[str, float]:
    """Returns the metrics that show a slow rank, from the own seconds per step of each."""
    slowest = max(own_seconds)
    return {
        "slowest_rank": own_seconds.index(slowest),
        "slowest_rank_seconds": round(slowest, 6),
        "median_rank_seconds": round(statistics.median(own_seconds), 6),
    }


def most_memory(device: torch.device) -> int:
    """The most bytes that tensors, on a CPU the process, have taken."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
