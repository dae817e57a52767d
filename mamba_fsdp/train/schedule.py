"""The learning rate's factor over the run: cosine, wsd, linear, constant, annealing."""

import math

AUTOMATIC = -1


class Schedule:
    """factor(before, more) in [0, 1] for the optimiser step that takes the run from `before` to `before + more` of
    `total`: all in steps, or all in tokens, of which the run's first step has `step`.

    The first factor is not 0: x = before + more. Warm-up rises as x/W, in cosine as 1 - (1 - x/W)^2 (fms-fsdp); wsd is
    Composer's: 1 until the decay, then (N - x)/decay, never below the floor.
    """

    def __init__(self, kind: str, total: int, *, step: int = 1, warmup: int = AUTOMATIC, decay: int = AUTOMATIC,
                 floor: float = 0.1) -> None:
        self.kind, self.total, self.floor = kind, max(total, 1), floor
        steps = -(-self.total // step)
        usual = 0 if kind in ("annealing", "constant") else min(2000, steps // 20) * step
        self.warmup = usual if warmup < 0 else warmup
        self.decay = max(1, steps // 10) * step if decay < 0 else decay

    def factor(self, before: int, more: int = 1) -> float:
        x = before + more
        rise = min(1.0, x / self.warmup) if self.warmup else 1.0
        if self.kind == "cosine":
            cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, x / self.total)))
            return min(1 - (1 - rise) ** 2, self.floor + (1 - self.floor) * cosine)
        if self.kind == "linear":
            return min(rise, max(self.floor, 1 - (1 - self.floor) * x / self.total))
        if self.kind == "wsd":
            left = (self.total - x) / self.decay if self.decay else 1.0
            return min(rise, max(self.floor, left))
        if self.kind == "annealing":
            return min(rise, max(0.0, 1 - before / self.total))
        assert self.kind == "constant", self.kind
        return rise
