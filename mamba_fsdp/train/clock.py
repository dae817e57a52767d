"""Throughput: seconds and tokens since the last report, and how each rank's share of the time compares."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

# Dense bf16 matrix peak of one device, FLOP/s, from the vendors' data sheets; MFU is shown for these only.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "A10G": 70e12, "L40S": 362e12, "L4": 121e12,
              "B200": 2250e12}


def device_peak(device_name: str) -> float | None:
    """FLOP/s of the device of this name, or None where we don't know. The longest name that fits wins: L40S is no
    L4."""
    fits = [name for name in PEAK_FLOPS if name in device_name]
    return PEAK_FLOPS[max(fits, key=len)] if fits else None


class Clock:
    """Times steps, from `step` on, leaving out what is no training (validation, waiting for a checkpoint)."""

    def __init__(self, step: int) -> None:
        self.began = self.interval_began = time.perf_counter()
        self.first_step = self.interval_step = step
        self.waited = 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count."""
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
        """Over the current report interval: (in all, less the time this rank waited for the others between its passes
        over the model)."""
        steps = max(1, step - self.interval_step)
        seconds = (time.perf_counter() - self.interval_began) / steps
        return seconds, seconds - self.waited / steps

    def next_interval(self, step: int) -> None:
        self.interval_began, self.interval_step, self.waited = time.perf_counter(), step, 0.0

    def seconds_left(self, step: int, total: int) -> float | None:
        done = step - self.first_step
        return (time.perf_counter() - self.began) / done * (total - step) if done else None


def stragglers(busy_seconds: list[float]) -> dict[str, float]:
    """The metrics that tell a slow rank: busy_seconds is one number per rank."""
    slowest = max(range(len(busy_seconds)), key=busy_seconds.__getitem__)
    return {"slowest_rank": slowest, "slowest_rank_seconds": round(busy_seconds[slowest], 6),
            "median_rank_seconds": round(statistics.median(busy_seconds), 6)}
