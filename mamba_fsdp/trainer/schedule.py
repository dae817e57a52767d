"""Computes the learning rate's factor over the run: one formula for each `schedule`, and what happens
when num_steps changes."""

import math
from dataclasses import dataclass

from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import Duration
from mamba_fsdp.reporting.console import PrintLine
from mamba_fsdp.settings.train_config import TrainConfig

AUTOMATIC = -1  # or less: converted to tokens, -1 is multiplied by the tokens of a step


@dataclass
class Schedule:
    """The learning rate's factor, in [0, 1], as a function of the position in the run.

    All lengths are in steps, or all are in tokens; `step` is then the tokens of the run's first
    step. An optimiser step takes the run from `before` to x = before + more of N = total. The
    formulas use x, so that the first factor is not 0.

    The warm-up rises as x/W. Most schedules then fall to the floor at N, as one of SHAPES. The fall
    starts at W; for wsd_cosine and wsd_sqrt at N - decay. fms_cosine (fms-fsdp) rises as
    1 - (1 - x/W)^2 and falls from 0 on. wsd (Composer) falls as (N - x)/decay, never below the
    floor; annealing (fms-fsdp) is 1 - before/N; inverse_sqrt is sqrt(T/(x - W + T)), where T is W,
    or 10,000 steps without warm-up.
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
        """Returns the factor of the next step, after `ahead` steps that `state` does not count."""
        if self.in_tokens:
            return self.factor(state.tokens + ahead * tokens_per_step, tokens_per_step)
        return self.factor(state.step + ahead)

    def factor(self, before: int, more: int = 1) -> float:
        x = before + more
        rise = 1.0
        if self.warmup:
            rise = min(1.0, x / self.warmup)
        if self.kind == "fms_cosine":
            rise = 1 - (1 - rise) ** 2
        return min(rise, self._fall(x, before))

    def _fall(self, x: int, before: int) -> float:
        """Returns the factor at x without the warm-up."""
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


# Each falls from 1 to 0 as the share of the fall that has passed goes from 0 to 1.
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
    """Returns the schedule of a run of `length`, or over schedule_steps if given. If the length is
    in tokens, the schedule counts tokens, and durations in steps are converted with the global batch
    of the run's start: another global batch then does not change the curve.

    The train state remembers the curve, which is the length over which the schedule runs. A run that
    resumes with a longer num_steps keeps its former curve and the learning rate at the end of that
    curve, unless the new curve has the same rate at the present step. It prints a line if the rates
    differ. Raises UserError if the rate would stay at 0."""
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
        curve = former  # the curve that an earlier start chose for this length
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
