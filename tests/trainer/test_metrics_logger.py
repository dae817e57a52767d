"""Tests mamba_fsdp.trainer.metrics_logger: the reports of steps in metrics.jsonl and in printed lines."""

import math
import re

import pytest

from mamba_fsdp.run.records import read_entries
from mamba_fsdp.trainer import loop
from mamba_fsdp.trainer.clock import Clock, delay_metrics

PEAK_FLOPS = 1e10
LABELS = 1314  # number of labels in the validation store of the corpus
POSITIVE = (
    "goodput",
    "goodput_of_commands",
    "tokens_per_second",
    "mfu",
    "data_wait_seconds",
    "checkpoint_stall_seconds",
)


@pytest.fixture
def flops_per_token(monkeypatch):
    """Gives the device a known peak speed. Returns a list to which each run appends its FLOPs per token when it
    starts."""
    found = []

    def train_at_peak(context, logger, *rest, _train=loop.train):
        logger.peak_flops = PEAK_FLOPS
        found.append(logger.flops_per_token)
        return _train(context, logger, *rest)

    monkeypatch.setattr(loop, "train", train_at_peak)
    return found


def test_a_report_is_a_line_and_an_entry_at_each_interval(train, tmp_path, flops_per_token):
    """At each report_interval, here every second step of 64 tokens, a line is printed and an entry is written, with
    the mean loss since the last report.

    The expected losses were computed by an earlier version of the program.
    """
    given = {"num_steps": 4, "publish": False, "schedule": "constant", "recipe": "published"}
    train(tmp_path / "each", **given)
    losses = [
        entry["loss"] for entry in read_entries(tmp_path / "each/metrics.jsonl") if "loss" in entry
    ]
    assert losses == pytest.approx([4.152922, 4.116724, 4.093144, 3.993663], rel=1e-5)
    printed = train(tmp_path / "run", report_interval="128tok", **given)
    validation, report, *_ = read_entries(tmp_path / "run/metrics.jsonl")
    assert validation["step"] == 0 and validation["val_share"] == round(128 / LABELS, 6)
    # There is only one source, and it does not have a tokenizer.
    assert not validation.keys() & {"val_source_loss", "val_bits_per_byte"}
    assert validation["val_perplexity"] == pytest.approx(math.exp(validation["val_loss"]))
    assert (report["step"], report["tokens"], report["learning_rate"]) == (2, 128, 0.01)
    assert report["loss"] == pytest.approx(sum(losses[:2]) / 2)
    assert report["perplexity"] == pytest.approx(math.exp(report["loss"]))
    assert report["grad_norm"] > 0 and report["skipped_steps"] == 0
    assert report["source_tokens"] == {"train": 128} and 0 < report["source_epochs"]["train"] < 1
    rate = report["tokens_per_second"]
    assert report["tokens_per_second_per_device"] == rate and report["goodput"] < 1
    assert report["mfu"] == pytest.approx(rate * flops_per_token[0] / PEAK_FLOPS, abs=1e-4)
    assert 0.01 < report["memory_gb"] < 1000 and report["goodput_of_commands"] < 1
    assert all(report[name] > 0 for name in POSITIVE)
    first, second, *_ = re.findall("^step .*", printed, flags=re.M)
    loss, perplexity = validation["val_loss"], validation["val_perplexity"]
    assert first.startswith(f"step 0: validation loss {loss:.4f}, perplexity {perplexity:.2f} (")
    assert re.fullmatch(
        rf"step 2/4  loss +{report['loss']:.4f}  lr 1\.00e-02 +[\d,]+ tok/s  MFU +[\d.]+%  left 0:00:0\d",
        second,
    )


def test_the_clock_excludes_pauses(monkeypatch):
    """The clock does not count pauses, such as saves. It also measures each rank's own seconds between the collective
    of a step and the next forward pass, which show which rank delays the others."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = Clock(1, ranks=2)
    for saving, own, passes in ((50, 1, 8), (0, 2, 9)):
        with clock.paused():
            now[0] += saving
        now[0] += own
        before = clock.own_seconds()
        now[0] += passes
        clock.record_sums([before, 3.0])
    assert clock.seconds_per_step(3) == (10.0, [1.5, 3.0]) and clock.mean_seconds(3) == 10.0
    largest = {"delaying_rank": 1, "largest_delay_seconds": 3.0}
    assert delay_metrics([1.5, 3.0]) == {**largest, "median_delay_seconds": 2.25}
