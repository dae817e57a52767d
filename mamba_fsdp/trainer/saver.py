"""Saves checkpoints when they are due. If a save fails, training continues, and the run tries again later."""

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

# Seconds of training before the next attempt; each failure doubles it.
FIRST_PAUSE = 60.0
MAX_PAUSE = 1800.0


class Saver:
    """The saving of checkpoints when they are due. All ranks call each method at the same point, and
    a failed save is known on all ranks."""

    def __init__(self, context: TrainContext, logger: MetricsLogger) -> None:
        self.context = context
        self.logger = logger
        self.max_failures = context.settings.checkpoint.max_failed_saves
        self.failures = 0  # saves that failed in a row
        self.pause = 0  # steps from a failure to the next attempt
        self.next_attempt = 0  # the step after which the next attempt is due

    def is_due(self, step: int) -> bool:
        """Returns whether a checkpoint is to be saved after `step`."""
        schedule = self.context.schedule
        if self.failures and step < schedule.total_steps:
            return step >= self.next_attempt
        return schedule.is_due(schedule.checkpoint_steps, step)

    def poll(self) -> None:
        """Takes the save under way to its next phase, see Checkpointer.settle. Call it once no rank
        writes any more. Raises UserError after max_failed_saves, except after the last step, which
        the final save follows."""
        is_last = self.context.state.step == self.context.schedule.total_steps
        with self._attempt(math.inf if is_last else self.max_failures):
            self.context.checkpointer.poll()

    def wait(self) -> None:
        """Waits for the save under way, and reports it if it fails."""
        with self._attempt(math.inf):
            self.context.checkpointer.wait()

    def save(self, final: bool) -> None:
        """Begins to save a checkpoint of the current step, once the save under way is committed.
        final: also waits until the new checkpoint is committed, and raises UserError if it fails.
        Otherwise raises as `settle` does."""
        checkpointer = self.context.checkpointer
        step = self.context.state.step
        if final:
            self.wait()
            with self._attempt(0):
                self._begin()
                checkpointer.wait()
            return
        with self._attempt(self.max_failures):
            checkpointer.wait()
        if self.is_due(step):
            self.next_attempt = step + self.pause
            with self._attempt(self.max_failures):
                self._begin()

    def _begin(self) -> None:
        context = self.context
        state = context.state
        # The metrics up to a committed checkpoint must not be lost.
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
        """Returns a context manager that reports a save that fails inside and schedules the next
        attempt. Raises UserError after `limit` failures in a row."""
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
        seconds_per_step = self.logger.clock.mean_seconds(step) or 1.0
        seconds_per_step = self.context.world.broadcast_object(seconds_per_step)
        self.pause = max(2, math.ceil(seconds / seconds_per_step))
        self.next_attempt = min(step + self.pause, self.context.schedule.total_steps)
        what_next = (
            f"{self.failures} of {self.max_failures} in a row; the next attempt comes after step "
            f"{self.next_attempt}"
        )
        self.logger.report_save_failure(step, self.failures, str(error), what_next)
