"""Runs the training loop. A step loads a batch, accumulates gradients, runs one small collective, clips the gradients
and updates the weights. Between some steps, the loop reports, validates and saves.

On a GPU, the host runs ahead of the device. The host reads the statistics of a step, such as the loss, after it has
launched the next step, so that it never waits for the device during a step. Clipping, skipping a step and the loss
scale of fp16 depend on these statistics within the same step. Therefore they are computed on the device. All ranks
compute them from the same sums, and so they all make the same decision.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mamba_fsdp.checkpoint.checkpointer import Phase
from mamba_fsdp.data.loader import Batch
from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.compat import step_unless_rejected
from mamba_fsdp.parallel.model import ParallelModel
from mamba_fsdp.run.records import OTHER_RANK_REASON
from mamba_fsdp.text import format_count
from mamba_fsdp.this_process import progress
from mamba_fsdp.trainer.clock import Clock
from mamba_fsdp.trainer.metrics_logger import MetricsLogger
from mamba_fsdp.trainer.saver import Saver
from mamba_fsdp.trainer.setup import TrainContext
from mamba_fsdp.trainer.step_stats import StepStats, StepSums, sum_over_ranks
from mamba_fsdp.trainer.stopping import StopRequest
from mamba_fsdp.trainer.validation import batch_loss, validate

# How many later steps can be launched before the statistics of a step are read.
STEPS_AHEAD = {"cpu": 0, "cuda": 1}


def train(
    context: TrainContext, logger: MetricsLogger, stop: StopRequest, validation_due: bool
) -> str:
    """Trains until the run has all its steps or is asked to stop.

    validation_due: whether to validate before the first step. Returns the reason to stop early, or "" after the last
    step. Raises UserError after max_skipped_steps skipped steps in a row, and if a validation loss is not finite.

    The train state counts the steps that have been read back from the device. Before a validation or a checkpoint, all
    steps have been read back.
    """
    schedule = context.schedule
    state = context.state
    saver = Saver(context, logger)
    steps = StepQueue(context, logger, saver, stop)
    must_stop = validation_due and not validate(context, logger, saver, stop)
    if must_stop or stop.any_rank_asked(context.world):
        return stop.reason or OTHER_RANK_REASON
    while state.step < schedule.total_steps:
        must_stop = steps.advance()
        if schedule.is_due(schedule.eval_steps, state.step):
            is_validated = validate(context, logger, saver, stop)
            must_stop = must_stop or not is_validated
        is_last = state.step == schedule.total_steps
        if must_stop or saver.is_due(state.step):
            saver.save(final=must_stop or is_last)
        if must_stop:
            return stop.reason or OTHER_RANK_REASON
    return ""


@dataclass
class PendingStep:
    """A step that the host has launched and that the device can still be computing."""

    batches: list[Batch]
    learning_rate: float
    save_phase: tuple[int, Phase] | None  # Checkpointer.save_phase when the step began
    # A function that waits for the device and returns the numbers that StepStats.pack has combined.
    read_numbers: Callable[[], list[float]]


class StepQueue:
    """The launched steps whose statistics (StepStats) the host has not read yet."""

    def __init__(
        self, context: TrainContext, logger: MetricsLogger, saver: Saver, stop: StopRequest
    ) -> None:
        self.context = context
        self.logger = logger
        self.saver = saver
        self.stop = stop
        self.max_pending = STEPS_AHEAD[context.world.device.type]
        self.steps: deque[PendingStep] = deque()

    def advance(self) -> bool:
        """Takes steps until the queue is empty, that is, until the host has read the statistics of all steps.

        On a CPU the queue is empty after each step. On a GPU it is emptied before a validation or a save, after the
        last step, and when a rank has been asked to stop. Returns whether the run must stop before its last step.
        """
        while True:
            step = take_step(self.context, self.logger.clock, self.stop, ahead=len(self.steps))
            self.steps.append(step)
            must_stop = self._finish(0 if self._is_something_due() else self.max_pending)
            if must_stop:
                self._finish(0)
            if not self.steps:
                is_last = self.context.state.step == self.context.schedule.total_steps
                return must_stop and not is_last

    def _is_something_due(self) -> bool:
        """Returns whether a validation or a save is due after the newest step. Both need the statistics of all steps."""
        schedule = self.context.schedule
        newest = self.context.state.step + len(self.steps)
        return schedule.is_due(schedule.eval_steps, newest) or self.saver.is_due(newest)

    def _finish(self, max_pending: int) -> bool:
        """Finishes the oldest steps, until at most `max_pending` are left. Returns whether a rank was asked to stop."""
        must_stop = False
        while len(self.steps) > max_pending:
            stats = finish_step(self.context, self.logger, self.saver, self.steps.popleft())
            self.stop.has_stepped = True
            must_stop = must_stop or stats.stop_requested
        return must_stop


def take_step(
    context: TrainContext, clock: Clock, stop: StopRequest, ahead: int = 0
) -> PendingStep:
    """Launches a step: computes the gradient of a global batch and updates the weights. All ranks call it.

    The host does not wait for the device. ahead: the number of launched steps that the train state does not count yet.
    """
    progress.touch()
    world = context.world
    schedule = context.schedule
    loss_scale = context.loss_scale

    began = time.perf_counter()
    batches = context.loader.step(context.state.step + ahead)
    clock.data_wait += time.perf_counter() - began
    # The weights are summed on the CPU, before the batches are moved to the device.
    label_weight = sum(batch.total_weight() for batch in batches)
    batches = [batch.to(world.device) for batch in batches]
    save_phase = context.checkpointer.save_phase()
    is_writing = context.checkpointer.is_writing()
    own_seconds = clock.own_seconds()

    # The total weight of the labels in the global batch is known only after the collective. Until then, the loss is
    # divided by the number of all labels.
    gradient_scale = loss_scale.value / schedule.tokens_per_step
    loss_sum = accumulate_gradients(context.parallel, context.optimizer, batches, gradient_scale)

    host_numbers = StepStats.pack_host_numbers(world, stop.check(), is_writing, own_seconds)
    squares = context.parallel.gradient_squares()
    sums = sum_over_ranks(world, loss_sum, squares, label_weight, host_numbers)

    multiple = schedule.tokens_per_step / loss_scale.value
    loss, gradient_norm, factor = mean_loss_and_norm(sums, multiple)
    factor_of_rate = schedule.lr.next_factor(context.state, schedule.tokens_per_step, ahead)
    learning_rate = context.settings.optimizer.learning_rate * factor_of_rate
    context.checkpointer.wait_for_copies()
    applied = update_weights(
        context.parallel,
        context.optimizer,
        loss,
        gradient_norm,
        factor,
        clip=context.settings.optimizer.grad_clip_thresh,
        lr=learning_rate,
    )
    loss_scale.update(applied)
    numbers = StepStats.pack(
        loss, gradient_norm, applied, loss_scale.value, loss_scale.good_steps, sums.host_numbers
    )
    return PendingStep(batches, learning_rate, save_phase, world.start_copy_to_host(numbers))


def finish_step(
    context: TrainContext, logger: MetricsLogger, saver: Saver, step: PendingStep
) -> StepStats:
    """Waits for the statistics of a step, counts the step in the train state, and reports it. Returns the statistics.

    Raises UserError after max_skipped_steps skipped steps in a row.
    """
    state = context.state
    stats = count_step(context, step)
    logger.clock.record_sums(stats.seconds_per_rank)
    if not stats.is_writing and step.save_phase == context.checkpointer.save_phase():
        saver.poll()  # all ranks have finished the current phase of the save
    if not stats.applied:
        logger.console.print_line(
            f"step {state.step} skipped: loss {stats.loss:.4g}, gradient norm "
            f"{stats.gradient_norm:.4g} ({state.skipped_steps} skipped so far)"
        )
    logger.report(stats, step.learning_rate)
    if state.skipped_in_a_row >= context.settings.training.max_skipped_steps:
        saver.wait()  # the save in progress began before the loss became non-finite
        raise UserError(describe_bad_samples(context, step.batches))
    return stats


def count_step(context: TrainContext, step: PendingStep) -> StepStats:
    """Waits for the statistics of a step, and counts the step in the train state. Returns the statistics."""
    schedule = context.schedule
    stats = StepStats.unpack(step.read_numbers())
    overflow_expected = context.loss_scale.record(context.state, stats)
    context.state.advance(
        schedule.global_batch,
        schedule.tokens_per_step,
        stats.loss,
        applied=stats.applied,
        excused=overflow_expected and math.isfinite(stats.loss),
    )
    return stats


def iterate_steps(context: TrainContext) -> Iterator[StepStats]:
    """Takes one step after the other, and yields the statistics of each. Nothing is reported, validated or saved."""
    clock = Clock(context.state.step, context.world.size)
    stop = StopRequest(context.checkpointer.folder, on_rank0=False)
    with context.loader:
        while True:
            yield count_step(context, take_step(context, clock, stop))


def accumulate_gradients(
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    scale: torch.Tensor,
) -> torch.Tensor:
    """Runs forward and backward on this rank's micro-batches. Returns the sum of their token losses (nats, 0-dim).

    scale: the token losses are multiplied by it before the backward pass. The gradients stay in the parameters.
    """
    optimizer.zero_grad(set_to_none=True)
    scale = scale.float()
    loss_sum = torch.zeros((), device=parallel.world.device)
    for index, batch in enumerate(batches):
        with parallel.accumulate(last=index == len(batches) - 1):
            loss = batch_loss(parallel.module, batch)
            (loss * scale).backward()
        loss_sum += loss.detach()
    parallel.reduce_gradients()
    return loss_sum


def mean_loss_and_norm(
    sums: StepSums, multiple: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (mean loss, norm of its gradient, factor), each 0-dim in fp64.

    The mean is weighted by the weights of the labels. The gradients in the parameters are the gradient of the loss sum
    divided by `multiple`. Multiplied by the factor, they are the gradient of the mean loss.
    """
    # If no label counts, divide by 1 and not by 0.
    label_weight = sums.label_weight + (sums.label_weight == 0)
    factor = multiple / label_weight
    gradient_norm = sums.gradient_squares.sqrt().float().double() * factor
    return sums.loss / label_weight, gradient_norm, factor


def update_weights(
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    loss: torch.Tensor,
    gradient_norm: torch.Tensor,
    factor: torch.Tensor,
    *,
    clip: float,
    lr: float,
) -> torch.Tensor:
    """Clips the gradients and takes the optimizer's step, unless the loss or the gradient is not finite.

    All tensors are 0-dim, in fp64, on the device. factor: the gradients are multiplied by it. gradient_norm: the norm
    of the gradients after this multiplication. clip: the maximum norm; 0 disables clipping. lr: the learning rate.

    Returns 1 if the step was applied, and 0 if it was not.
    """
    if clip:
        limit = gradient_norm.new_full((), clip)
        factor = factor * (limit / (gradient_norm + 1e-6)).clamp(max=1.0)
    parallel.scale_gradients(factor.float())
    for group in optimizer.param_groups:
        group["lr"] = lr
    is_bad = ~(loss.isfinite() & gradient_norm.isfinite())
    step_unless_rejected(optimizer, is_bad)
    return 1.0 - is_bad.double()


def describe_bad_samples(context: TrainContext, batches: list[Batch]) -> str:
    """Returns the error message for steps with a non-finite loss or gradient. The message names the samples of the last
    step.

    All ranks call it. batches: the micro-batches of the last step on this rank.
    """
    own = [f"{name} window {window}" for batch in batches for name, window in batch.samples]
    samples = context.world.gather_unique(own)
    named = samples[:8]
    if len(samples) > 8:
        named.append("...")
    state = context.state
    return (
        f"the loss or gradient of {format_count(state.skipped_in_a_row, 'step')} in a row was not finite; the last one is step "
        f"{state.step}, with the samples {', '.join(named)}. Lower learning_rate, use mixed_precision=bf16, or inspect these samples"
    )
