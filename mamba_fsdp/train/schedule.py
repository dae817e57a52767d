"""The learning rate's factor at each step: cosine, wsd, linear, constant, annealing."""

import math

AUTOMATIC = -1


class Schedule:
    """factor(step) in [0, 1] for the optimiser step that takes the weights from `step` to `step + 1` of `total` steps.

    The factor of step 0 is not 0: x counts steps from 1. Warm-up rises as x/W, in cosine as 1 - (1 - x/W)^2 (fms-fsdp);
    wsd is Composer's: 1 until the decay, then (N - x)/decay, never below the floor.
    """

    def __init__(self, kind: str, total: int, *, warmup: int = AUTOMATIC, decay: int = AUTOMATIC,
                 floor: float = 0.1) -> None:
        self.kind, self.total, self.floor = kind, max(total, 1), floor
        usual = 0 if kind in ("annealing", "constant") else min(2000, self.total // 20)
        self.warmup = usual if warmup == AUTOMATIC else warmup
        self.decay = max(1, self.total // 10) if decay == AUTOMATIC else decay

    def factor(self, step: int) -> float:
        x = step + 1
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
            return min(rise, max(0.0, 1 - step / self.total))
        assert self.kind == "constant", self.kind
        return rise
