"""Saves checkpoints when they are due. If a save fails, training continues and the save is retried later."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict

import torch

from mamba_fsdp.checkpoint.saved_run import SavedRun
from mamba_fsdp.errors import LeaseLostError, UserError
from mamba_fsdp.text import format_count
from mamba_fsdp.trainer.metrics_logger import MetricsLogger
from mamba_fsdp.trainer.setup import TrainContext

# Seconds of training between a failed save and the next attempt. Each failure doubles them.
FIRST_PAUSE = 60.0
MAX_PAUSE = 1800.0


class Saver:
    """Saves checkpoints when they are due. All ranks call each method at the same point, and see the same failures."""

    def __init__(self, context: TrainContext, logger: MetricsLogger) -> None:
        self.context = context
        self.logger = logger
        self.max_failures = context.settings.checkpoint.max_failed_saves
        self.failures = 0  # number of failed saves in a row
        self.pause = 0  # number of steps between a failure and the next attempt
        self.next_attempt = 0  # the next attempt is due after this step

    def is_due(self, step: int) -> bool:
        """Returns whether a save is due after `step`."""
        schedule = self.context.schedule
        if self.failures and step < schedule.total_steps:
            return step >= self.next_attempt
        return schedule.is_due(schedule.checkpoint_steps, step)

    def poll(self) -> None:
        """Moves the save in progress to its next phase, see Checkpointer.poll.

        Call it once all ranks have finished the current phase. Raises UserError after max_failed_saves failures in a
        row, except after the last step, because the final save follows.
        """
        is_last = self.context.state.step == self.context.schedule.total_steps
        with self._attempt(math.inf if is_last else self.max_failures):
            self.context.checkpointer.poll()

    def wait(self) -> None:
        """Waits for the save in progress. Reports a failure, but does not raise it."""
        with self._attempt(math.inf):
            self.context.checkpointer.wait()

    def save(self, final: bool) -> None:
        """Starts to save a checkpoint of the current step, after the save in progress is committed.

        If the save in progress fails, the new save is postponed, unless it is the final one.

        final: whether to wait until the new checkpoint is committed, and to raise UserError if this save fails.
        Otherwise UserError is raised only after max_failed_saves failures in a row.
        """
        checkpointer = self.context.checkpointer
        step = self.context.state.step
        if final:
            self.wait()
            with self._attempt(0):
                self._start_save()
                checkpointer.wait()
            return
        with self._attempt(self.max_failures):
            checkpointer.wait()
        if self.is_due(step):
            self.next_attempt = step + self.pause
            with self._attempt(self.max_failures):
                self._start_save()

    def _start_save(self) -> None:
        context = self.context
        state = context.state
        # Metrics of steps before a committed checkpoint must not be lost, because the steps are not repeated.
        context.world.on_rank0(self.logger.sync)
        state.data = context.loader.state_before(state.step)
        settings = context.settings
        run = SavedRun(
            progress=state,
            model=asdict(settings.model),
            optimizer=settings.optimizer.optimizer,
            torch=torch.__version__,
            world_size=context.world.size,
            seq_length=settings.data.seq_length,
        )
        context.checkpointer.save(
            state.step, context.parallel.shards(context.optimizer), asdict(run)
        )

    @contextlib.contextmanager
    def _attempt(self, limit: float) -> Iterator[None]:
        """Reports a save that fails in the block, and schedules the next attempt.

        Raises UserError after `limit` failures in a row; 0 raises the first one. LeaseLostError is always raised.
        The time in the block does not count as training time.
        """
        committed_before = self.context.checkpointer.last
        try:
            with self.logger.clock.paused():
                yield
        except LeaseLostError:
            raise
        except UserError as error:
            self.failures += 1
            if limit == 0:
                raise
            self._postpone(error)
            if self.failures >= limit:
                raise type(error)(
                    f"{format_count(self.failures, 'save')} in a row failed (max_failed_saves), and the run stops; "
                    f"the last error: {error}"
                ) from None
            return
        if self.failures and self.context.checkpointer.last != committed_before:
            self.failures = 0
            self.logger.report_save_recovery(self.context.state.step)

    def _postpone(self, error: UserError) -> None:
        step = self.context.state.step
        seconds = min(FIRST_PAUSE * 2 ** (self.failures - 1), MAX_PAUSE)
        seconds_per_step = self.context.world.broadcast_object(self.logger.clock.mean_seconds(step))
        self.pause = max(2, math.ceil(seconds / seconds_per_step))
        self.next_attempt = min(step + self.pause, self.context.schedule.total_steps)
        what_next = (
            f"{self.failures} of {self.max_failures} in a row; the next attempt comes after step "
            f"{self.next_attempt}"
        )
        self.logger.report_save_failure(step, self.failures, str(error), what_next)
