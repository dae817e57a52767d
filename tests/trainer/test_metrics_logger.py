"""What a run tells: rank 0 writes and shows, the others take part."""

import re
import time
from types import SimpleNamespace

import pytest

from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.data.loader import BatchShape
from mamba_fsdp.parallel.world import World
from mamba_fsdp.report.console import Console
from mamba_fsdp.report.records import read
from mamba_fsdp.settings.fields import Duration
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer.clock import Clock
from mamba_fsdp.trainer.metrics_logger import MetricsLogger
from mamba_fsdp.trainer.run_folder import RunFolder
from mamba_fsdp.trainer.run_schedule import RunSchedule
from mamba_fsdp.trainer.schedule import Schedule
from mamba_fsdp.trainer.step_stats import StepStats


def stats(loss):
    return StepStats(
        loss=loss,
        gradient_norm=0.5,
        applied=True,
        loss_scale=1.0,
        loss_scale_good_steps=0,
        stop_requested=False,
        is_writing=False,
        seconds_per_rank=[0.0],
    )


@pytest.fixture
def logger_of(tmp_path, monkeypatch):
    """logger_of(world) -> a MetricsLogger of a run of 4 steps of 64 tokens that reports every second one."""
    monkeypatch.setattr("mamba_fsdp.lease.Lease.check", lambda *_: None)
    settings = TrainConfig()
    settings.report.report_interval = Duration.parse("128tok")
    schedule = RunSchedule(
        BatchShape(0, 1, 2),
        tokens_per_step=64,
        total_steps=4,
        eval_steps=0,
        eval_batches=0,
        checkpoint_steps=4,
        lr=Schedule("constant", 4),
    )
    position = {"seq_length": 32, "drawn": {"it": 3}, "windows": {"it": 4}}

    def make(world):
        context = SimpleNamespace(
            settings=settings,
            world=world,
            schedule=schedule,
            state=TrainState(),
            loader=SimpleNamespace(state_before=lambda step: position),
            checkpointer=SimpleNamespace(stall_seconds=lambda: 1.5),
        )
        return MetricsLogger(context, RunFolder(tmp_path), Console(enabled=world.rank == 0))

    return make


def test_a_report_is_a_line_and_an_entry_where_it_is_due(logger_of, tmp_path, capsys):
    with logger_of(World.alone()) as logger:
        state = logger.context.state
        logger.clock.data_wait = 0.25
        state.step, state.tokens = 1, 64
        logger.report(stats(4.0), 0.01)
        logger.clock.began -= 1000  # so long the next step has taken
        logger.validated(1, 3.0, 40, 0.174, 0.25)
        state.step, state.tokens, state.skipped_steps = 2, 128, 1
        state.loss_sum, state.loss_steps = 7.0, 2
        state.step_seconds = 2000
        state.first_started = time.time() - 4000
        logger.peak_flops = 1e12
        flops = logger.flops_per_token
        logger.report(stats(3.0), 0.01)
    validation, report = read(tmp_path / "metrics.jsonl")
    assert validation == {
        "step": 1,
        "val_loss": 3.0,
        "val_perplexity": pytest.approx(20.0855, rel=1e-4),
        "val_tokens": 40,
        "val_share": 0.174,
    }
    rate = report.pop("tokens_per_second")
    assert report.pop("tokens_per_second_per_device") == rate > 0
    assert 0.01 < report.pop("memory_gb") < 1000
    assert report.pop("goodput") == pytest.approx(3000 / 4000, abs=0.05)
    assert report.pop("mfu") == pytest.approx(rate * flops / 1e12, abs=1e-4)
    assert report == {
        "step": 2,
        "tokens": 128,
        "loss": 3.5,
        "perplexity": pytest.approx(33.1155, rel=1e-4),
        "learning_rate": 0.01,
        "grad_norm": 0.5,
        "data_wait_seconds": 0.25,
        "checkpoint_stall_seconds": 1.5,
        "skipped_steps": 1,
        "source_tokens": {"it": 3 * 32},
        "source_epochs": {"it": 0.75},
    }
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step 1: validation loss 3.0000, perplexity 20.09 (17.4% of the data, 0.2 s)"
    assert re.fullmatch(
        r"step 2/4  loss  3\.5000  lr 1\.00e-02 +[\d,]+ tok/s  MFU +\d+\.\d%  left 0:16:40", second
    )


def test_the_clock_leaves_out_what_is_no_training(monkeypatch):
    """And a rank's own seconds are those between a step's sum over ranks and the next forward pass."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = Clock(0, ranks=2)

    def step(saving, own, passes):
        with clock.paused():
            now[0] += saving
        now[0] += own
        before = clock.own_seconds()
        now[0] += passes
        clock.meet([before, 3.0])

    step(saving=50, own=1, passes=8)
    step(saving=0, own=2, passes=9)
    assert clock.seconds_per_step(2) == (10.0, [1.5, 3.0]) and clock.mean_seconds(2) == 10.0
    clock.next_interval(2)
    step(saving=7, own=1, passes=1)
    assert clock.seconds_per_step(3) == (2.0, [1.0, 3.0])
