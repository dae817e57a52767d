"""Measures seconds per training step since the last report, and compares the ranks."""

import contextlib
import resource
import statistics
import time
from collections.abc import Iterator

import torch


class Clock:
    """A timer of training steps from `step` on. Validation and saving checkpoints do not count.

    A rank's own seconds run from the moment at which all ranks know a step's sums to its next forward
    pass. The rank spends them on reports and on data."""

    def __init__(self, step: int, ranks: int = 1) -> None:
        now = time.perf_counter()
        self.began = now
        self.first_step = step
        self.interval_began = now  # at the last report
        self.interval_step = step
        self.together = now  # when all ranks last knew the sums of a step
        self.own = [0.0] * ranks  # each rank's own seconds since the last report
        self.data_wait = 0.0  # seconds of waiting for data since the last report
        self.returned_seconds = 0.0  # seconds that new_seconds has returned so far

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Returns a context manager; the time spent inside it does not count."""
        before = time.perf_counter()
        yield
        seconds = time.perf_counter() - before
        self.began += seconds
        self.interval_began += seconds
        self.together += seconds

    def new_seconds(self) -> float:
        """Returns the seconds of training steps since the last call."""
        before = self.returned_seconds
        self.returned_seconds = time.perf_counter() - self.began
        return self.returned_seconds - before

    def own_seconds(self) -> float:
        """Returns this rank's own seconds; call it right before the next forward pass."""
        return time.perf_counter() - self.together

    def meet(self, own_seconds: list[float]) -> None:
        """Records that all ranks know a step's sums. own_seconds: each rank's, before that step."""
        self.own = [before + seconds for before, seconds in zip(self.own, own_seconds)]
        self.together = time.perf_counter()

    def seconds_per_step(self, step: int) -> tuple[float, list[float]]:
        """Returns means since the last report: (seconds per step, each rank's own seconds). At least one step came since."""
        steps = step - self.interval_step
        in_all = time.perf_counter() - self.interval_began
        return in_all / steps, [seconds / steps for seconds in self.own]

    def next_interval(self, step: int) -> None:
        self.interval_began = time.perf_counter()
        self.interval_step = step
        self.own = [0.0] * len(self.own)
        self.data_wait = 0.0

    def mean_seconds(self, step: int) -> float | None:
        """Returns the mean seconds of all steps so far, or None before the first step has ended."""
        done = step - self.first_step
        if not done:
            return None
        return (time.perf_counter() - self.began) / done


def delays(own_seconds: list[float]) -> dict[str, float]:
    """Returns the metrics of a rank that the others wait for between steps, from each rank's own seconds per step."""
    largest = max(own_seconds)
    return {
        "delaying_rank": own_seconds.index(largest),
        "largest_delay_seconds": round(largest, 6),
        "median_delay_seconds": round(statistics.median(own_seconds), 6),
    }


def most_memory(device: torch.device) -> int:
    """Returns the peak memory in bytes: of the tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
