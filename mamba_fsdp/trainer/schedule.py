"""Computes the schedule of a run: its length and intervals in steps, and the learning rate as a function of the position.

Also handles changes of num_steps when a run resumes.
"""

import datetime
import math
from dataclasses import dataclass

from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.data.sampler import Sampler
from mamba_fsdp.errors import UserError, command
from mamba_fsdp.fields import Duration
from mamba_fsdp.model.spec import flops_per_token
from mamba_fsdp.reporting.console import PrintLine
from mamba_fsdp.settings.train_config import VALIDATION_SHARE, TrainConfig
from mamba_fsdp.text import format_count, format_quantity

MAX_PASSES = 100  # a run that reads its data more often gets a warning
# The time of a step divided by the time of its forward pass. A backward pass takes twice as long as a forward pass.
STEP_TO_FORWARD_RATIO = 3
# Every length of AUTOMATIC or less means "automatic", because a conversion to tokens multiplies -1 by the tokens per
# step.
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


# Each function begins at 1 and ends at 0, while its argument, the share of the fall that has passed, rises from 0 to 1. Only
# cosine_with_restarts returns to 1 in between, at the start of each further cycle.
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
    if the learning rate at the current step is the same in both schedules. If it differs, a line about it is printed.

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


@dataclass(frozen=True)
class RunSchedule:
    """The length of a run and its intervals, in steps."""

    global_batch: int  # samples per step
    tokens_per_step: int
    total_steps: int
    eval_steps: int  # interval of validations; 0 disables them
    eval_batches: int  # global batches of each store per validation; 0 means all
    checkpoint_steps: int  # interval of checkpoints
    lr: Schedule

    def is_due(self, interval: int, step: int) -> bool:
        """Returns whether something that is due every `interval` steps, and after the last step, is due after `step`.

        interval: 0 means never.
        """
        return interval > 0 and (step % interval == 0 or step == self.total_steps)


def run_length(settings: TrainConfig, sampler: Sampler) -> Duration:
    """Returns the length of the run: num_steps, or num_epochs converted to tokens.

    Raises UserError for num_epochs with dummy data, because this data does not have an end.
    """
    epochs = settings.training.num_epochs
    if not epochs:
        return settings.training.num_steps
    if settings.data.use_dummy_dataset:
        raise UserError("num_epochs: use_dummy_dataset has no epochs; give num_steps")
    windows = math.ceil(epochs * sampler.epoch_windows)
    return Duration(windows * settings.data.seq_length, "tok")


def schedule_run(
    settings: TrainConfig,
    global_batch: int,
    state: TrainState,
    length: Duration,
    stores: int,
    print_line: PrintLine,
) -> RunSchedule:
    """Returns the schedule of the run.

    state: the current position. Its fields `first_tokens_per_step` and `schedule` are updated. length: the length of
    the whole run, including the steps or tokens before `state`. stores: the number of stores to validate on.
    """
    training = settings.training
    tokens_per_step = global_batch * settings.data.seq_length
    if not state.first_tokens_per_step:
        state.first_tokens_per_step = tokens_per_step
    if state.global_batch not in (0, global_batch):
        print_line(
            f"batch      {format_count(global_batch, 'sample')} per step from here on, {state.global_batch} before; "
            f"set global_batch_size={state.global_batch} to keep it the same on any number of ranks"
        )
    total_steps = length.count
    if length.unit == "tok":
        tokens_left = max(0, length.count - state.tokens)
        total_steps = state.step + -(-tokens_left // tokens_per_step)
    eval_steps = 0
    if stores:
        eval_steps = training.eval_interval.steps(tokens_per_step)
    eval_batches = training.eval_batches
    if eval_batches < 0:
        eval_batches = math.ceil(
            VALIDATION_SHARE * (STEP_TO_FORWARD_RATIO * eval_steps) / max(1, stores)
        )
    return RunSchedule(
        global_batch,
        tokens_per_step,
        total_steps,
        eval_steps=eval_steps,
        eval_batches=eval_batches,
        checkpoint_steps=settings.checkpoint.checkpoint_interval.steps(tokens_per_step),
        lr=make_schedule(settings, state, length, tokens_per_step, print_line),
    )


def expected_time(state: TrainState, total_steps: int) -> str:
    """Returns the expected time of the remaining steps. It is only known for a run that has taken steps."""
    if not state.step_seconds:
        return f"unknown before the first step; {command('plan')} estimates it for GPUs"
    seconds = state.step_seconds / state.step * max(0, total_steps - state.step)
    return f"{datetime.timedelta(seconds=int(seconds))} for the remaining steps, at the mean speed of the first {state.step:,}"


def print_length(
    settings: TrainConfig, schedule: RunSchedule, epoch_windows: int, print_line: PrintLine
) -> None:
    """Prints the number of steps, and the tokens and FLOPs of each step. Warns if the run reads its data very often.

    epoch_windows: the number of samples in one epoch.
    """
    seq_length = settings.data.seq_length
    flops = flops_per_token(settings.model, seq_length) * schedule.tokens_per_step
    print_line(
        f"steps      {schedule.total_steps:,} of {schedule.global_batch:,} x {seq_length:,} = "
        f"{schedule.tokens_per_step:,} tokens; {format_quantity(flops, 'FLOP')} each, "
        f"{format_quantity(flops * schedule.total_steps, 'FLOP')} in all"
    )
    passes = schedule.total_steps * schedule.global_batch / epoch_windows
    if passes > MAX_PASSES and not settings.training.num_epochs:
        print_line(
            f"warning    the run would read the data {passes:,.0f} times; set a lower num_steps, or num_epochs=10"
        )
