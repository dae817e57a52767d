"""The train state survives being saved, and is never half understood."""

import json
from dataclasses import fields

import pytest

from mamba_fsdp.checkpoint.saved_run import SavedRun, TrainState
from mamba_fsdp.errors import UserError
from mamba_fsdp.settings.model_config import ModelConfig
from tests.support.checkpoints import edit, saved_state


def test_a_saved_state_is_read_back_whole():
    numbers = {field.name: number for number, field in enumerate(fields(TrainState))}
    others = {"data": {"drawn": {"a": 7}}, "schedule": {"curve": {}}, "tokenizer": "ids:of it"}
    state = TrainState(**{**numbers, **others})
    saved = json.loads(json.dumps(saved_state(ModelConfig(), state)))
    run = SavedRun.from_state(saved, "a checkpoint")
    assert run.progress == state and ModelConfig(**run.model) == ModelConfig()


def test_a_step_that_was_not_applied_counts_without_its_loss():
    state = TrainState()
    for loss, applied, excused in (
        (2.0, True, False),
        (9.0, False, True),
        (9.0, False, False),
        (9.0, False, False),
    ):
        state.advance(4, 128, loss, applied=applied, excused=excused)
    assert (state.step, state.samples, state.tokens, state.optimizer_steps) == (4, 16, 512, 1)
    assert (state.skipped_steps, state.skipped_in_a_row) == (3, 2)
    state.advance(4, 128, 3.0, applied=True, excused=False)
    assert state.skipped_in_a_row == 0 and state.take_mean_loss() == 2.5
    assert state.take_mean_loss() != state.take_mean_loss(), "nan where no step was applied"


def test_a_state_of_a_newer_version_is_refused_in_a_line(train, tmp_path):
    """By the run itself and by one that starts from it: the field, the checkpoint, what to do."""
    train(tmp_path / "run", num_steps=2)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000002"
    state = json.loads((checkpoint / "state.json").read_text())["state"]
    state["progress"]["curriculum"] = 3
    edit(checkpoint / "state.json", state=state)
    for run, given in (("run", {}), ("other", {"load_ckpt_path": tmp_path / "run"})):
        with pytest.raises(
            UserError, match=f"{checkpoint}: its state.json .* has an unknown field 'curriculum'"
        ) as refused:
            train(tmp_path / run, num_steps=4, **given)
        assert "\n" not in str(refused.value)
