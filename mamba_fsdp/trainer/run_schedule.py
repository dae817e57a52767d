"""Converts the durations in the settings to steps: the length of the run, and when validations and checkpoints are
due."""

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
from mamba_fsdp.trainer.schedule import Schedule, make_schedule

MAX_PASSES = 100  # a run that reads its data more often gets a warning
FORWARDS_OF_A_STEP = 3  # a step takes as long as this many forward passes: a backward pass takes twice as long as one


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
            "global_batch_size keeps it the same on any number of ranks"
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
            VALIDATION_SHARE * (FORWARDS_OF_A_STEP * eval_steps) / max(1, stores)
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
