"""Runs the training loop: sample a batch, accumulate its gradients, run one small collective, clip,
step; now and then report, validate, save.

On a GPU the host runs ahead: it reads a step's numbers when the next step is under way, and nothing
in a step makes it wait. Clipping, skipping a step and the loss scale of fp16 depend on those
numbers within the step; all ranks decide them on the device, from the same sums."""

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

STEPS_AHEAD = {"cpu": 0, "cuda": 1}  # steps that may be under way when a step's numbers are read


def train(
    context: TrainContext, logger: MetricsLogger, stop: StopRequest, validation_due: bool
) -> str:
    """Returns why the run stopped early, or "" once it has all its steps.

    validation_due: whether to validate before the first step. Raises UserError after
    max_skipped_steps in a row, and for a validation loss that is not finite. The train state is the
    state after the last step whose numbers have been read; before a validation or a checkpoint, the
    numbers of all steps have been read."""
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
    """A step that the device may still be computing."""

    batches: list[Batch]
    learning_rate: float
    save_phase: tuple[int, Phase] | None  # of the save under way when the step began
    read_numbers: Callable[[], list[float]]  # waits for the device


class StepQueue:
    """The steps that the device may still be computing while the host runs ahead of it."""

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
        """Takes steps until the numbers of all of them are read: on a CPU after each step, on a GPU before a
        validation or a save, after the last step, and once a rank is asked to stop. Returns whether to stop before
        the last step."""
        while True:
            step = take_step(self.context, self.logger.clock, self.stop, ahead=len(self.steps))
            self.steps.append(step)
            is_asked = self._finish(0 if self._is_something_due() else self.max_pending)
            if is_asked:
                self._finish(0)
            if not self.steps:
                is_last = self.context.state.step == self.context.schedule.total_steps
                return is_asked and not is_last

    def _is_something_due(self) -> bool:
        """Returns whether a validation or a save, which need all numbers, comes after the newest step."""
        schedule = self.context.schedule
        newest = self.context.state.step + len(self.steps)
        return schedule.is_due(schedule.eval_steps, newest) or self.saver.is_due(newest)

    def _finish(self, max_pending: int) -> bool:
        """Finishes the oldest steps, until at most `most` are under way. Returns whether a rank was asked to stop."""
        is_asked = False
        while len(self.steps) > max_pending:
            stats = finish_step(self.context, self.logger, self.saver, self.steps.popleft())
            self.stop.has_stepped = True
            is_asked = is_asked or stats.stop_requested
        return is_asked


def take_step(
    context: TrainContext, clock: Clock, stop: StopRequest, ahead: int = 0
) -> PendingStep:
    """Returns a step under way, which computes the gradient of a global batch and updates the
    weights with it. The host does not wait for the device. ahead: how many steps are under way."""
    progress.touch()
    world = context.world
    schedule = context.schedule
    loss_scale = context.loss_scale

    began = time.perf_counter()
    batches = context.loader.step(context.state.step + ahead)
    clock.data_wait += time.perf_counter() - began
    # Summed on the CPU, before the batches are moved to the device.
    label_weight = sum(batch.total_weight() for batch in batches)
    batches = [batch.to(world.device) for batch in batches]
    save_phase = context.checkpointer.save_phase()
    is_writing = context.checkpointer.is_writing()
    own_seconds = clock.own_seconds()

    # The number of labels that count in the global batch is known only once the ranks have summed.
    # Until then the loss is divided by the number of all labels.
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
    """Returns the numbers of a step, which it waits for, counts and reports. Raises UserError as
    `train` does."""
    state = context.state
    stats = count_step(context, step)
    logger.clock.record_sums(stats.seconds_per_rank)
    if not stats.is_writing and step.save_phase == context.checkpointer.save_phase():
        saver.poll()  # all ranks have written the save under way, or rank 0 has committed it
    if not stats.applied:
        logger.console.print_line(
            f"step {state.step} skipped: loss {stats.loss:.4g}, gradient norm "
            f"{stats.gradient_norm:.4g} ({state.skipped_steps} skipped so far)"
        )
    logger.report(stats, step.learning_rate)
    if state.skipped_in_a_row >= context.settings.training.max_skipped_steps:
        saver.wait()  # the checkpoint under way is of an earlier, finite step
        raise UserError(describe_bad_samples(context, step.batches))
    return stats


def count_step(context: TrainContext, step: PendingStep) -> StepStats:
    """Returns the numbers of a step, which it waits for, and counts the step in the train state."""
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
    """Yields the numbers of one step after the other. Nothing is reported, validated or saved."""
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
    """Returns the sum of the token losses of this rank's micro-batches, after their forward and
    backward passes. They leave the gradients of the token losses times `scale`."""
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
    """Returns (mean loss per label that counts, norm of the gradient of this mean, factor), each
    0-dim fp64. The present gradients belong to the loss sum divided by `multiple`; times the
    factor, they are the gradient of the mean."""
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
    """Returns 1 if the optimiser's step was applied, or 0 if the loss or the gradient was not
    finite. All tensors are 0-dim fp64 on the device.

    gradient_norm: of the gradients times `factor`. clip: the largest norm to step with; 0: no
    clipping."""
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
    """Returns the message that names the samples of the step, if its loss or gradient is not
    finite."""
    own = [f"{name} window {window}" for batch in batches for name, window in batch.samples]
    samples = context.world.gather_unique(own)
    named = samples[:8]
    if len(samples) > 8:
        named.append("...")
    state = context.state
    return (
        f"the loss or gradient of {format_count(state.skipped_in_a_row, 'step')} in a row was not finite; the last is step "
        f"{state.step}, of the samples {', '.join(named)}. Lower learning_rate, use mixed_precision=bf16, or look at these samples"
    )
