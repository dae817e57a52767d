"""Defines the train state, and what else a checkpoint says of its run besides the tensors. Without torch."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mamba_fsdp.checkpoint.contents import read_contents
from mamba_fsdp.errors import UserError
from mamba_fsdp.storage.typed_json import at_least, from_json


@dataclass
class TrainState:
    """The position of a run, the same on all ranks. `samples` and `tokens` count what was read, in skipped steps
    too."""

    step: int = 0
    samples: int = 0
    global_batch: int = 0  # samples of the last step; 0 before the first
    tokens: int = 0
    first_tokens_per_step: int = 0  # in the run's first step; 0 before it
    # Updates of the optimiser's moments, including those in the run that the moments were loaded from.
    optimizer_steps: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    loss_sum: float = 0.0  # of the applied steps since the last report
    loss_steps: int = 0
    loss_scale: float = 0.0  # for fp16, see LossScale; 0 before the first step in fp16
    loss_scale_good_steps: int = 0
    # The position in the data when last loaded or saved, see Sampler.state_after.
    data: dict[str, Any] = field(default_factory=dict)
    # What the learning rate follows, see schedule.py.
    schedule: dict[str, Any] = field(default_factory=dict)
    first_started: float = 0.0  # when the run first began, seconds since the epoch
    # Seconds spent in steps, without steps that a crash lost.
    step_seconds: float = 0.0
    tokenizer: str = ""  # its identity; it made the tokens that the model learns

    def advance(
        self, samples: int, tokens: int, loss: float, *, applied: bool, excused: bool
    ) -> None:
        """Counts a step of the global batch. excused: if the step was not applied, its samples are not the
        cause."""
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
        """Returns the mean loss of the steps applied since the last call; nan if there were none."""
        mean = math.nan
        if self.loss_steps:
            mean = self.loss_sum / self.loss_steps
        self.loss_sum = 0.0
        self.loss_steps = 0
        return mean


@dataclass
class SavedRun:
    """The content of Contents.state: what a run saves in its checkpoints."""

    progress: TrainState
    model: dict[str, Any]  # settings of ModelConfig
    optimizer: str
    torch: str  # version of torch
    world_size: int
    seq_length: int = at_least(1)

    @classmethod
    def from_state(cls, state: dict[str, Any], checkpoint: Path) -> "SavedRun":
        """Returns the run whose state a checkpoint holds. Raises UserError if it holds something else."""
        try:
            return from_json(cls, state, "the state")
        except ValueError as error:
            raise UserError(
                f"{checkpoint}: its state.json does not hold the state of a run of this version of the program: {error}"
            ) from None


def read_run(checkpoint: Path) -> SavedRun:
    """Returns what a checkpoint says of its run. Raises BrokenError and UserError."""
    return SavedRun.from_state(read_contents(checkpoint).state, checkpoint)
