"""The length of a run in epochs: how many windows one has, and that such a run is over and is lengthened."""

import pytest

from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.data.loader import split_step
from mamba_fsdp.fields import Duration
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer.run_schedule import schedule_run
from mamba_fsdp.trainer.starting_point import say_passes
from tests.support.tiny import resolved


def test_another_global_batch_is_told_once_and_a_length_in_tokens_stays():
    said = []
    state = TrainState()
    length = Duration(8192, "tok")
    for samples, steps in ((4, 8), (2, 1 + 14), (2, 1 + 14)):
        schedule = schedule_run(TrainConfig(), samples, state, length, 0, said.append)
        assert schedule.total_steps == steps
        state.advance(samples, 256 * samples, 1.0, applied=True, excused=False)
    (line,) = said
    assert line.startswith("batch      2 samples per step from here on, 4 before; ")


@pytest.mark.parametrize("stores, batches", [(0, 0), (1, 15), (2, 8)])
def test_validations_take_a_twentieth_of_the_time_of_steps(stores, batches):
    """Of 100 steps between two of them, each as long as three forward passes."""
    settings = TrainConfig().changed(eval_interval=Duration(100, "steps"))
    length = Duration(9, "steps")
    schedule = schedule_run(settings, 2, TrainState(), length, stores, pytest.fail)
    assert (schedule.eval_steps, schedule.eval_batches) == (100 * (stores > 0), batches)


@pytest.mark.parametrize("batch_size, told", [(17, "16 passes of 17 samples"), (18, "")])
def test_a_recipes_batch_that_takes_many_passes_is_told(batch_size, told):
    settings = resolved(model_name="mamba-130m", batch_size=batch_size)
    said = []
    say_passes(settings, split_step(settings, 0, 1).global_batch, 1, said.append)
    assert told in "".join(said) and len(said) == bool(told)


@pytest.mark.slow
def test_a_run_of_epochs_learns_ends_and_is_lengthened(train, tmp_path, metrics_of):
    """An epoch is the windows of all datasets of the mixture."""
    common = {"datasets": "train,other", "batch_size": 64, "eval_interval": 0, "publish": False}
    train(tmp_path, num_epochs=0.9, **common)
    first, *_, last = metrics_of(tmp_path)
    assert last["loss"] < first["loss"] - 0.1
    assert last["source_epochs"] == pytest.approx({"train": 0.9, "other": 0.9}, abs=0.15)
    assert "over " in train(tmp_path, num_epochs=0.9, **common)
    assert "follows the former schedule" in train(tmp_path, num_epochs=1.8, **common)
    assert metrics_of(tmp_path)[-1]["step"] in (2 * last["step"], 2 * last["step"] - 1)
