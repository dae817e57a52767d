"""Defines the state of a run that a checkpoint stores besides the tensors. This module does not import torch."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mamba_fsdp.checkpoint.contents import read_contents
from mamba_fsdp.errors import UserError
from mamba_fsdp.storage.typed_json import at_least, from_json


@dataclass
class TrainState:
    """The position of a run, the same on all ranks. `samples` and `tokens` also count the data of skipped steps."""

    step: int = 0
    samples: int = 0
    global_batch: int = 0  # samples of the last step; 0 before the first step
    tokens: int = 0
    first_tokens_per_step: int = 0  # tokens of the run's first step; 0 before it
    # The number of updates of the optimizer's moments. It includes the updates in the run that they were loaded from.
    optimizer_steps: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    loss_sum: float = 0.0  # sum of the losses of the steps applied since the last report
    loss_steps: int = 0  # the number of steps in loss_sum
    loss_scale: float = 0.0  # see LossScale; 0 before the first step in fp16
    loss_scale_good_steps: int = 0
    # The position in the data at the last load or save, see Sampler.state_after.
    data: dict[str, Any] = field(default_factory=dict)
    # The length of the learning rate schedule, see make_schedule.
    schedule: dict[str, Any] = field(default_factory=dict)
    first_started: float = 0.0  # when the run was first started, in seconds since the epoch
    # Seconds spent in steps, without steps that were lost in a crash.
    step_seconds: float = 0.0
    tokenizer: str = ""  # identity of the tokenizer of the training data

    def advance(
        self, samples: int, tokens: int, loss: float, *, applied: bool, excused: bool
    ) -> None:
        """Counts one step.

        samples, tokens: the numbers that the step has read. loss: the mean loss of the step. applied: whether the
        weights were updated. excused: whether the samples are not the cause of a step that was not applied. Such a step
        does not count in `skipped_in_a_row`.
        """
        self.step += 1
        self.samples += samples
        self.global_batch = samples
        self.tokens += tokens
        if applied:
            self.optimizer_steps += 1
            self.skipped_in_a_row = 0
            self.loss_sum += loss
            self.loss_steps += 1
        else:
            self.skipped_steps += 1
            if not excused:
                self.skipped_in_a_row += 1

    def take_mean_loss(self) -> float:
        """Returns the mean loss of the steps applied since the last call, or NaN if there were none. Then begins a new
        mean."""
        mean = math.nan
        if self.loss_steps:
            mean = self.loss_sum / self.loss_steps
        self.loss_sum = 0.0
        self.loss_steps = 0
        return mean


@dataclass
class SavedRun:
    """The state that a run stores in its checkpoints, as Contents.state."""

    progress: TrainState
    model: dict[str, Any]  # the fields of ModelConfig
    optimizer: str
    torch: str  # the version of torch
    world_size: int
    seq_length: int = at_least(1)

    @classmethod
    def from_state(cls, state: dict[str, Any], checkpoint: Path) -> "SavedRun":
        """Parses the state of a checkpoint. Raises UserError if it was written by another version of this program."""
        try:
            return from_json(cls, state, "the state")
        except ValueError as error:
            raise UserError(
                f"{checkpoint}: another version of the program wrote state.json ({error}); use that version"
            ) from None


def read_saved_run(checkpoint: Path) -> SavedRun:
    """Reads the state of the run from a checkpoint.

    Raises BrokenCheckpointError if state.json is damaged, and UserError if another version of this program wrote it.
    """
    return SavedRun.from_state(read_contents(checkpoint).state, checkpoint)
