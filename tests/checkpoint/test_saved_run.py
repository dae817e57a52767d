"""Tests SavedRun and TrainState, the state that a run stores in a checkpoint besides tensors."""

import math
from dataclasses import asdict
from pathlib import Path

import pytest

from mamba_fsdp.checkpoint.saved_run import SavedRun, TrainState, read_saved_run
from mamba_fsdp.errors import UserError
from tests.support.checkpoints import open_run, shards_of


def test_a_train_state_counts_read_samples_and_applied_steps():
    """TrainState.advance counts samples and tokens of every step, and optimizer steps only if the step was applied.

    Consecutive skipped steps are counted, except for excused ones, until a step is applied.
    """
    state = TrainState()
    assert not any(asdict(state).values()) and math.isnan(state.take_mean_loss())
    state.advance(2, 16, 3.0, applied=True, excused=False)
    state.advance(4, 32, 5.0, applied=True, excused=False)
    for excused in (False, True, False):
        state.advance(4, 32, math.inf, applied=False, excused=excused)
    counts = {"step": 5, "samples": 18, "global_batch": 4, "tokens": 144, "optimizer_steps": 2}
    counts |= {"skipped_steps": 3, "skipped_in_a_row": 2}
    assert counts.items() <= asdict(state).items()
    assert state.take_mean_loss() == 4 and math.isnan(state.take_mean_loss())
    state.advance(4, 32, 1.0, applied=True, excused=False)
    assert state.skipped_in_a_row == 0 and state.take_mean_loss() == 1


def test_the_state_of_a_run_is_restored_or_refused_by_name(run):
    checkpointer = open_run(run)
    run = SavedRun(TrainState(step=3), {"d_model": 8}, "adamw", "2.2.2", 1, 32)
    checkpointer.save(3, shards_of(3), asdict(run))
    checkpointer.wait()
    assert read_saved_run(checkpointer.last) == run
    with pytest.raises(
        UserError,
        match="^run: another version of the program wrote state.json .seq_length is 0, not",
    ):
        SavedRun.from_state({**asdict(run), "seq_length": 0}, Path("run"))
