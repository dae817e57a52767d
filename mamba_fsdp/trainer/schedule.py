"""Computes the learning rate over the run. Defines a formula for each `schedule`, and handles changes of num_steps."""

import math
from dataclasses import dataclass

from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import Duration
from mamba_fsdp.reporting.console import PrintLine
from mamba_fsdp.settings.train_config import TrainConfig

# Lower values mean the same: when -1 is converted to tokens, it is multiplied by the tokens per step.
AUTOMATIC = -1


@dataclass
class Schedule:
    """The factor of the learning rate, in [0, 1], as a function of the position in the run.

    All lengths are either in steps or in tokens. If they are in tokens, `step` is the number of tokens in the run's
    first step, otherwise it is 1. An optimizer step moves the run from the position `before` to x = before + more. The
    formulas use x, so that the first factor is not 0. N is the total length, and W the length of the warm-up.

    During the warm-up, the factor rises as x/W. After it, most schedules fall to the floor at N with the shape in
    SHAPES. The fall starts at W, or at N - decay for wsd_cosine and wsd_sqrt. The exceptions are:

    - fms_cosine (from fms-fsdp) rises as 1 - (1 - x/W)^2, and its fall starts at 0.
    - wsd (from Composer) falls as (N - x)/decay, but not below the floor.
    - annealing (from fms-fsdp) is 1 - before/N.
    - inverse_sqrt is sqrt(T/(x - W + T)). T is W, or 10,000 steps if W is 0.
    """

    kind: str
    total: int
    step: int = 1
    warmup: int = AUTOMATIC
    decay: int = AUTOMATIC
    floor: float = 0.1
    power: float = 1.0
    cycles: int = 1
    in_tokens: bool = False

    def __post_init__(self) -> None:
        self.total = max(self.total, 1)
        steps = -(-self.total // self.step)
        if self.warmup <= AUTOMATIC and self.kind in ("annealing", "constant"):
            self.warmup = 0
        elif self.warmup <= AUTOMATIC:
            self.warmup = min(2000, steps // 20) * self.step
        if self.decay <= AUTOMATIC:
            self.decay = max(1, steps // 10) * self.step
        self.timescale = self.warmup or 10_000 * self.step
        self.fall_start = self.warmup
        if self.kind == "fms_cosine":
            self.fall_start = 0
        elif self.kind.startswith("wsd"):
            self.fall_start = self.total - self.decay

    def next_factor(self, state: TrainState, tokens_per_step: int, ahead: int = 0) -> float:
        """Returns the factor for the next step. ahead: the number of launched steps that `state` does not count yet."""
        if self.in_tokens:
            return self.factor(state.tokens + ahead * tokens_per_step, tokens_per_step)
        return self.factor(state.step + ahead)

    def factor(self, before: int, more: int = 1) -> float:
        """Returns the factor for the step from position `before` to `before + more`."""
        x = before + more
        rise = 1.0
        if self.warmup:
            rise = min(1.0, x / self.warmup)
        if self.kind == "fms_cosine":
            rise = 1 - (1 - rise) ** 2
        return min(rise, self._fall(x, before))

    def _fall(self, x: int, before: int) -> float:
        """Returns the factor at x as if there had been no warm-up."""
        if self.kind == "constant":
            return 1.0
        if self.kind == "annealing":
            return max(0.0, 1 - before / self.total)
        if self.kind == "wsd":
            return max(self.floor, (self.total - x) / self.decay) if self.decay else 1.0
        if self.kind == "inverse_sqrt":
            return math.sqrt(self.timescale / (x - self.warmup + self.timescale))
        share = (x - self.fall_start) / max(1, self.total - self.fall_start)
        shape = SHAPES[self.kind](self, min(1.0, max(0.0, share)))
        return self.floor + (1 - self.floor) * shape

    def _cosine(self, share: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * share))

    def _restarted(self, share: float) -> float:
        return self._cosine(self.cycles * share % 1) if share < 1 else 0.0

    def _polynomial(self, share: float) -> float:
        return (1 - share) ** self.power

    def _root(self, share: float) -> float:
        return 1 - math.sqrt(share)


# Each function falls from 1 to 0 while its argument, the share of the fall that has passed, rises from 0 to 1.
SHAPES = {
    "cosine": Schedule._cosine,
    "fms_cosine": Schedule._cosine,
    "wsd_cosine": Schedule._cosine,
    "cosine_with_restarts": Schedule._restarted,
    "linear": Schedule._polynomial,
    "polynomial": Schedule._polynomial,
    "wsd_sqrt": Schedule._root,
}


def make_schedule(
    settings: TrainConfig,
    state: TrainState,
    length: Duration,
    tokens_per_step: int,
    print_line: PrintLine,
) -> Schedule:
    """Returns the schedule of a run of `length`. The setting schedule_steps, if given, replaces this length.

    If the length is in tokens, the schedule counts tokens. Durations in steps are then converted with the global batch
    of the run's first step, so that a later change of the global batch does not change the schedule.

    The train state stores the length over which the schedule extends. If a run resumes with a larger num_steps, it
    keeps its former schedule, and afterwards the learning rate at the end of this schedule. It gets a new schedule only
    if the learning rate at the current step is the same in both. If the two differ, a line about it is printed.

    Raises UserError if the learning rate would stay at 0 after the end of the former schedule.
    """
    schedule_steps = settings.lr_schedule.schedule_steps
    is_given = schedule_steps.count > 0
    if is_given:
        length = schedule_steps
    former = length
    former_length = str(length)
    if state.schedule:
        former_length = state.schedule["length"]
        former = Duration.parse(state.schedule["curve"])
    curve = length
    if former_length == str(length) and not is_given:
        curve = former  # an earlier start selected this schedule for this length
    elif former != length:
        peak = settings.optimizer.learning_rate
        rates = [
            peak
            * _build_schedule(settings, each, state, tokens_per_step).next_factor(
                state, tokens_per_step
            )
            for each in (former, length)
        ]
        change = f"goes from {rates[0]:.2e} to {rates[1]:.2e}"
        is_shorter = former.unit == length.unit and former.count > length.count
        if not (math.isclose(*rates) or is_given or is_shorter):
            curve = former
            change = (
                f"follows the former schedule, {rates[0]:.2e} now, and keeps the value at its end; "
                f"schedule_steps={length} would make it {rates[1]:.2e}"
            )
        if not math.isclose(*rates):
            print_line(
                f"schedule   its length was {former_length} and is now {length}: the learning rate {change}"
            )

    state.schedule = {"length": str(length), "curve": str(curve)}
    schedule = _build_schedule(settings, curve, state, tokens_per_step)
    if schedule.warmup > schedule.total:
        print_line(
            f"warning    the warm-up is {schedule.warmup / schedule.total:.3g} times as long as the schedule: the learning "
            f"rate never reaches {settings.optimizer.learning_rate:g}; lower warmup_steps"
        )
    if curve != length and not schedule.factor(curve.count):
        raise UserError(
            f"num_steps={length}: the schedule ends at {former_length}, and the learning rate is 0 after "
            f"that; schedule_steps={length} gives the schedule the new length"
        )
    return schedule


def _build_schedule(
    settings: TrainConfig, curve: Duration, state: TrainState, tokens_per_step: int
) -> Schedule:
    config = settings.lr_schedule
    in_tokens = curve.unit == "tok"
    if in_tokens:
        step = state.first_tokens_per_step
        warmup = config.warmup_steps.tokens(step)
        decay = config.decay_steps.tokens(step)
    else:
        step = 1
        warmup = config.warmup_steps.steps(tokens_per_step)
        decay = config.decay_steps.steps(tokens_per_step)
    if config.warmup_ratio:
        warmup = math.ceil(config.warmup_ratio * curve.count)
    return Schedule(
        config.schedule,
        curve.count,
        step=step,
        warmup=warmup,
        decay=decay,
        floor=config.min_learning_rate_ratio,
        power=config.polynomial_power,
        cycles=config.restart_cycles,
        in_tokens=in_tokens,
    )
