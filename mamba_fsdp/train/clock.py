"""Seconds per training step since the last report, and how the ranks compare."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

# Dense bf16 matrix peak of one device, FLOP/s, from the vendors' data sheets; MFU is shown for these only.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "A10G": 70e12, "L40S": 362e12, "L4": 121e12,
              "B200": 2250e12}


def device_peak(device_name: str) -> float | None:
    """Peak FLOP/s of a device, None for an unknown one. The longest name that fits wins: an L40S is not an L4."""
    fits = [name for name in PEAK_FLOPS if name in device_name]
    return PEAK_FLOPS[max(fits, key=len)] if fits else None


class Clock:
    """Times training steps from `step` on; validation and waiting for a checkpoint do not count."""

    def __init__(self, step: int) -> None:
        self.began = self.interval_began = time.perf_counter()
        self.first_step = self.interval_step = step
        self.waited = 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The time spent inside does not count."""
        before = time.perf_counter()
        yield
        seconds = time.perf_counter() - before
        self.began += seconds
        self.interval_began += seconds

    def wait(self, function: Callable, *arguments: Any) -> Any:
        """Calls a function whose time is spent waiting for other ranks."""
        before = time.perf_counter()
        result = function(*arguments)
        self.waited += time.perf_counter() - before
        return result

    def seconds_per_step(self, step: int) -> tuple[float, float]:
        """Since the last report: (in all, without the time that this rank waited for the others in `wait`)."""
        steps = max(1, step - self.interval_step)
        seconds = (time.perf_counter() - self.interval_began) / steps
        return seconds, seconds - self.waited / steps

    def next_interval(self, step: int) -> None:
        self.interval_began, self.interval_step, self.waited = time.perf_counter(), step, 0.0

    def seconds_left(self, step: int, total: int) -> float | None:
        done = step - self.first_step
        return (time.perf_counter() - self.began) / done * (total - step) if done else None


def stragglers(busy_seconds: list[float]) -> dict[str, float]:
    """The metrics that show a slow rank, from one number per rank."""
    slowest = max(busy_seconds)
    return {"slowest_rank": busy_seconds.index(slowest), "slowest_rank_seconds": round(slowest, 6),
            "median_rank_seconds": round(statistics.median(busy_seconds), 6)}
