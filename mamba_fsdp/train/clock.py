"""Throughput: seconds and tokens since the last report, and how each rank's share of the time compares."""

import statistics
import time

# Dense bf16 matrix peak of one device, FLOP/s, from the vendors' data sheets; MFU is shown for these only.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "A10G": 70e12, "L40S": 362e12, "L4": 121e12,
              "B200": 2250e12}


def device_peak(device_name):
    """FLOP/s of the device of this name, or None where we don't know. The longest name that fits wins: L40S is no
    L4."""
    fits = [name for name in PEAK_FLOPS if name in device_name]
    return PEAK_FLOPS[max(fits, key=len)] if fits else None


class Clock:
    """Times steps, leaving out what is no training (validation, waiting for a checkpoint to be written)."""

    def start(self, step):
        self.began = self.interval_began = time.perf_counter()
        self.first_step = self.interval_step = step
        self.waited = 0.0

    def skip(self, seconds):
        self.began += seconds
        self.interval_began += seconds

    def wait(self, function, *arguments):
        """Calls a function whose time is spent waiting for other ranks."""
        before = time.perf_counter()
        result = function(*arguments)
        self.waited += time.perf_counter() - before
        return result

    def seconds_per_step(self, step):
        """Over the current report interval."""
        return (time.perf_counter() - self.interval_began) / max(1, step - self.interval_step)

    def busy_seconds_per_step(self, step):
        """The same less the time this rank waited for the others between its passes over the model."""
        return self.seconds_per_step(step) - self.waited / max(1, step - self.interval_step)

    def next_interval(self, step):
        self.interval_began, self.interval_step, self.waited = time.perf_counter(), step, 0.0

    def seconds_left(self, step, total):
        done = step - self.first_step
        return (time.perf_counter() - self.began) / done * (total - step) if done else None


def stragglers(busy_seconds):
    """The metrics that tell a slow rank: busy_seconds is one number per rank."""
    slowest = max(range(len(busy_seconds)), key=busy_seconds.__getitem__)
    return {"slowest_rank": slowest, "slowest_rank_seconds": round(busy_seconds[slowest], 6),
            "median_rank_seconds": round(statistics.median(busy_seconds), 6)}
