"""Measures the seconds per training step since the last report, and compares the ranks."""

import contextlib
import resource
import statistics
import time
from collections.abc import Iterator

import torch


class Clock:
    """Measures the time of training steps. Validation and checkpoints are excluded with `paused`.

    step: the last step before the clock starts. ranks: the number of ranks.

    The own seconds of a rank are the time from the collective of one step to the next forward pass. In this time, the
    rank reports and waits for data, and a slow rank delays the others.
    """

    def __init__(self, step: int, ranks: int = 1) -> None:
        now = time.perf_counter()
        self.began = now
        self.first_step = step
        self.interval_began = now  # the time of the last report
        self.interval_step = step  # the step of the last report
        self.synchronized = now  # the time of the last collective
        self.rank_seconds = [0.0] * ranks  # own seconds of each rank since the last report
        self.data_wait = 0.0  # seconds spent waiting for data since the last report

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock during the block."""
        before = time.perf_counter()
        yield
        seconds = time.perf_counter() - before
        self.began += seconds
        self.interval_began += seconds
        self.synchronized += seconds

    def seconds(self) -> float:
        """Returns the seconds of training steps since the clock started."""
        return time.perf_counter() - self.began

    def own_seconds(self) -> float:
        """Returns this rank's own seconds since the last collective. Call it right before the forward pass."""
        return time.perf_counter() - self.synchronized

    def record_sums(self, own_seconds: list[float]) -> None:
        """Records that the collective of a step has finished.

        own_seconds: the own seconds of each rank before this step.
        """
        self.rank_seconds = [
            before + seconds for before, seconds in zip(self.rank_seconds, own_seconds)
        ]
        self.synchronized = time.perf_counter()

    def seconds_per_step(self, step: int) -> tuple[float, list[float]]:
        """Returns (seconds per step, own seconds per step of each rank), both as means since the last report.

        At least one step must have ended since the last report.
        """
        steps = step - self.interval_step
        total = time.perf_counter() - self.interval_began
        return total / steps, [seconds / steps for seconds in self.rank_seconds]

    def next_interval(self, step: int) -> None:
        """Starts the interval of the next report, after `step`."""
        self.interval_began = time.perf_counter()
        self.interval_step = step
        self.rank_seconds = [0.0] * len(self.rank_seconds)
        self.data_wait = 0.0

    def mean_seconds(self, step: int) -> float:
        """Returns the mean seconds per step since the clock started. Before the first step has ended, returns the
        seconds so far."""
        return self.seconds() / max(1, step - self.first_step)


def delay_metrics(own_seconds: list[float]) -> dict[str, float]:
    """Returns the metrics that show which rank delays the others between steps.

    own_seconds: the own seconds per step of each rank, see Clock.
    """
    largest = max(own_seconds)
    return {
        "delaying_rank": own_seconds.index(largest),
        "largest_delay_seconds": round(largest, 6),
        "median_delay_seconds": round(statistics.median(own_seconds), 6),
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak memory in bytes. On a GPU, this is the memory of tensors, and on a CPU the memory of the
    whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
