"""Saving a run's checkpoints when they are due. Where saving fails, training continues for a while and tries again."""

import math
from collections.abc import Callable
from typing import Any

from mamba_fsdp.errors import LostError, UserError
from mamba_fsdp.train.metrics_logger import MetricsLogger
from mamba_fsdp.train.setup import TrainContext

FIRST_PAUSE, LONGEST_PAUSE = (
    60.0,
    1800.0,
)  # seconds of training before the next attempt; each failure doubles it


class Saver:
    """All ranks call each method at the same point, and all learn alike of a save that failed."""

    def __init__(self, parts: TrainContext, recorder: MetricsLogger) -> None:
        self.parts, self.recorder, self.most = (
            parts,
            recorder,
            parts.settings.checkpoint.max_failed_saves,
        )
        # Saves that failed in a row, steps until the next one is tried, the step after which that is.
        self.failed = self.pause = self.next_attempt = 0

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be saved after `step`."""
        plan = self.parts.plan
        if self.failed and step < plan.total_steps:
            return step >= self.next_attempt
        return plan.is_due(plan.checkpoint_steps, step)

    def settle(self) -> None:
        """Where no rank writes: Checkpointer.settle. Raises UserError after max_failed_saves, but not at the end."""
        last = self.parts.state.step == self.parts.plan.total_steps
        self._try(lambda: self.parts.checkpointer.settle(), math.inf if last else self.most)

    def save(self, final: bool) -> None:
        """Saves a checkpoint after the current step, unless one is still being written and does not come to an end.
        final: until it is committed. Raises UserError where that fails, and as `settle` does."""
        step = self.parts.state.step
        if self.wait(final, patient=final or not self.failed) and self.is_due(step) or final:
            self.next_attempt = (
                step + self.pause
            )  # this one, or that which takes longer than its pause, is under way
            if final or not self.parts.checkpointer.pending:
                self._try(lambda: self._save(final), 0 if final else self.most)

    def wait(self, final: bool = False, **how: Any) -> bool:
        """Checkpointer.wait. Whether no save failed; raises UserError as `settle` does."""
        return self._try(
            lambda: self.parts.checkpointer.wait(**how), math.inf if final else self.most
        )

    def _save(self, final):
        parts, state = self.parts, self.parts.state
        # The metrics up to a committed checkpoint must not be lost.
        parts.world.on_rank0(self.recorder.sync)
        state.data = parts.loader.state_before(state.step)
        parts.checkpointer.save(
            state.step,
            parts.parallel.shards(parts.optimizer),
            state.saved(parts.settings, parts.world.size),
        )
        if final:
            parts.checkpointer.wait()

    def _try(self, action: Callable[[], None], most: float) -> bool:
        """Whether `action` did not fail; its failure is told. Raises UserError where it is one of `most` in a row."""
        checkpointer, recorder, step = self.parts.checkpointer, self.recorder, self.parts.state.step
        before = checkpointer.last
        try:
            with recorder.clock.paused():
                action()
        except LostError:
            raise
        except UserError as error:
            self.failed += 1
            if not most:
                raise
            pause = min(FIRST_PAUSE * 2 ** (self.failed - 1), LONGEST_PAUSE)
            seconds = self.parts.world.broadcast_object(
                recorder.clock.seconds_left(step, step + 1) or 1.0
            )
            self.pause = max(2, math.ceil(pause / seconds))
            self.next_attempt = min(step + self.pause, self.parts.plan.total_steps)
            recorder.save_failed(
                step,
                self.failed,
                str(error),
                f"{self.failed} of {self.most} in a row; the next "
                f"attempt comes after step {self.next_attempt}",
            )
            if self.failed >= most:
                raise type(error)(
                    f"{self.failed} saves in a row failed (max_failed_saves), so that the run stops "
                    f"rather than train unsaved; the last: {error}"
                ) from None
            return False
        if self.failed and checkpointer.last != before:
            self.failed = 0
            recorder.save_failed(step)
        return True
