"""The learning rate's factor over the run: cosine, wsd, linear, constant, annealing; and over a run made longer."""

import math
from collections.abc import Callable
from typing import Any

from config.fields import Duration
from config.train_config import TrainConfig
from mamba_fsdp.errors import UserError
from mamba_fsdp.train.state import TrainState

AUTOMATIC = -1


class Schedule:
    """factor(before, more) in [0, 1] for the optimiser step that takes the run from `before` to `before + more` of
    `total`: all in steps, or all in tokens, of which the run's first step has `step`.

    The first factor is not 0: x = before + more. Warm-up rises as x/W, in cosine as 1 - (1 - x/W)^2 (fms-fsdp); wsd is
    Composer's: 1 until the decay, then (N - x)/decay, never below the floor. A schedule that begins anew does so at
    `start`, and its warm-up at the factor `low`.
    """

    def __init__(
        self,
        kind: str,
        total: int,
        *,
        step: int = 1,
        warmup: int = AUTOMATIC,
        decay: int = AUTOMATIC,
        floor: float = 0.1,
        start: int = 0,
        low: float = 0.0,
        in_tokens: bool = False,
    ) -> None:
        self.kind, self.total, self.floor, self.start, self.low = (
            kind,
            max(total - start, 1),
            floor,
            start,
            low,
        )
        self.in_tokens, steps = in_tokens, -(-self.total // step)
        usual = 0 if kind in ("annealing", "constant") else min(2000, steps // 20) * step
        self.warmup = usual if warmup < 0 else warmup
        self.decay = max(1, steps // 10) * step if decay < 0 else decay

    def next_factor(self, state: TrainState, tokens_per_step: int, ahead: int = 0) -> float:
        """That of the step to come, after `ahead` that the state does not count yet."""
        before, more = (state.tokens, tokens_per_step) if self.in_tokens else (state.step, 1)
        return self.factor(before + ahead * more, more)

    def factor(self, before: int, more: int = 1) -> float:
        before -= self.start
        factor = self._factor(before, before + more)
        return max(factor, self.low) if before + more <= self.warmup else factor

    def _factor(self, before, x):
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


def schedule_of(
    settings: TrainConfig,
    state: TrainState,
    length: Duration,
    tokens_per_step: int,
    say: Callable[[str], None],
) -> Schedule:
    """The schedule of a run of `length`. It counts tokens where that is in tokens: its steps are then those of the
    run's start, so that another global batch does not bend it.

    Where the length has changed and with it the learning rate at hand, says so, and makes of a longer run what
    `lengthened` says. The train state keeps it. Raises UserError where the learning rate would be held at 0.
    """
    given, first = settings.lr_schedule, state.first_tokens_per_step
    length = given.schedule_steps if given.schedule_steps.count > 0 else length

    def made(total: int, in_tokens: bool, **begins: Any) -> Schedule:
        warmup, decay = (
            duration.tokens(first) if in_tokens else duration.steps(tokens_per_step)
            for duration in (given.warmup_steps, given.decay_steps)
        )
        return Schedule(
            given.schedule,
            total,
            step=first if in_tokens else 1,
            in_tokens=in_tokens,
            warmup=warmup,
            decay=decay,
            floor=given.min_learning_rate_ratio,
            **begins,
        )

    anew = {"total": length.count, "in_tokens": length.unit == "tok"}
    kept = state.schedule or {"num_steps": str(length), "lengthened": "", "curve": anew}
    curve, choice, former = kept["curve"], given.lengthened, kept["num_steps"]
    if former != str(length) or kept["lengthened"] and choice not in ("auto", kept["lengthened"]):
        here, there = (made(**one).next_factor(state, tokens_per_step) for one in (curve, anew))
        shorter = anew["in_tokens"] == curve["in_tokens"] and length.count < curve["total"]
        choice = (
            "" if shorter or math.isclose(here, there) else "hold" if choice == "auto" else choice
        )
        if choice == "hold" and not made(**curve).factor(curve["total"]):
            raise UserError(
                f"num_steps={length}: the learning rate ends at 0 with the {former} steps before, where "
                "nothing is learnt; choose lengthened=rewarm or lengthened=follow"
            )
        rates = [
            f"{settings.optimizer.learning_rate * factor:.2e}" for factor in (here, there, 1.0)
        ]
        told = {
            "hold": "keeps its former curve, at {} now; follow would set {}, rewarm warm up again to {}",
            "rewarm": "warms up again from {0} to {2}",
        }.get(choice, "goes from {} to {}").format(*rates)
        if not math.isclose(here, there):
            say(
                f"schedule   num_steps was {former}, is {length}{choice and f' (lengthened={choice})'}: the learning "
                f"rate {told}"
            )
        begins = (
            {"start": state.tokens if anew["in_tokens"] else state.step, "low": here}
            if choice == "rewarm"
            else {}
        )
        kept = {
            "num_steps": str(length),
            "lengthened": choice,
            "curve": curve if choice == "hold" else anew | begins,
            "since_step": state.step,
            "learning_rate": settings.optimizer.learning_rate * here,
        }
    state.schedule = kept
    return made(**kept["curve"])
