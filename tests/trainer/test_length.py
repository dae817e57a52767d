"""The length of a run in epochs: how many windows one has, and that such a run resumes and is lengthened."""

import shutil

import pytest

from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.data.loader import BatchShape
from mamba_fsdp.data.sampler import Sampler
from mamba_fsdp.settings.fields import Duration
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer.run_schedule import schedule_run
from tests.support.checkpoints import equal


def test_an_epoch_is_the_windows_of_the_mixture():
    class Of:
        def __init__(self, tokens):
            self.token_count, self.identity = tokens, "x"

    order = Sampler({"a": Of(101), "b": Of(51), "out": Of(1001)}, {"a": 2, "b": 1, "out": 0}, 10, 0)
    assert order.epoch_windows == 10 + 5
    source, window = order.samples(0, 15)
    assert len(set(zip(source.tolist(), window.tolist()))) == 15


def test_another_global_batch_is_told_once():
    said = []
    state = TrainState()
    settings = TrainConfig()
    for samples in (4, 2, 4, 4):
        batch_shape = BatchShape(0, 1, samples)
        schedule_run(settings, batch_shape, state, Duration(100, "steps"), 0, said.append)
        for _ in range(3):
            state.advance(samples, 256 * samples, 1.0, applied=True, excused=False)
    assert [line.split("; ")[0] for line in said] == [
        "batch      2 samples per step from here on, 4 before",
        "batch      4 samples per step from here on, 2 before",
    ]


@pytest.mark.slow
def test_a_run_of_epochs_resumes_and_is_lengthened(train, tmp_path, weights_of, metrics_of):
    common = {"batch_size": 64, "eval_interval": 0, "checkpoint_interval": 2}
    train(tmp_path / "whole", num_epochs=0.9, **common)
    whole = metrics_of(tmp_path / "whole")[-1]["step"]
    train(tmp_path / "broken", num_epochs=0.9, **common)
    for step in sorted((tmp_path / "broken/checkpoints").glob("step_*"))[1:]:
        shutil.rmtree(step)
    (tmp_path / "broken/pth").rename(tmp_path / "former")
    assert "resumes    from" in train(tmp_path / "broken", num_epochs=0.9, **common)
    assert equal(weights_of(tmp_path / "whole"), weights_of(tmp_path / "broken"))
    assert "over " in train(tmp_path / "whole", num_epochs=0.9, **common)
    said = train(tmp_path / "whole", num_epochs=1.8, **common)
    assert "follows the former schedule" in said and metrics_of(tmp_path / "whole")[-1]["step"] in (
        2 * whole,
        2 * whole - 1,
    )
