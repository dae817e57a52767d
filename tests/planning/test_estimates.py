"""Tests mamba_fsdp.planning.estimate: the estimated memory and time of a step, the figures of devices, and the choice
of the fastest settings that fit."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmarks import published
from mamba_fsdp.planning.devices import INSTANCES, Instance, device_peak
from mamba_fsdp.planning.estimate import best_estimate, estimate, local_machine
from tests.support.tiny import resolved

ESTIMATES = yaml.safe_load(Path(__file__).with_name("estimates.yaml").read_text())
DEVICES = yaml.safe_load(Path(__file__).with_name("devices.yaml").read_text())
SMALL = {"d_model": 2048, "n_layer": 8, "seq_length": 2048, "global_batch_size": 64}


def rounded(parts):
    """Rounds the values of a dict to four digits and leaves out zeros."""
    found = {}
    for part, value in parts.items():
        number = float(f"{value:.4g}")
        if number:
            found[part] = int(number) if number.is_integer() else number
    return found


@pytest.mark.parametrize("line", ESTIMATES)
def test_estimates_equal_the_recorded_ones(line, golden):
    """Estimates equal the recorded ones in estimates.yaml, which cover each strategy, mixer, precision and
    optimizer."""
    name, machine, nodes, *words = line.split()
    given = dict(word.split("=", 1) for word in words)
    found = estimate(resolved(model_name=name, **given), int(nodes), INSTANCES[machine])
    totals = {
        "tokens_per_step": found.tokens_per_step,
        "checkpoint_bytes": found.checkpoint_bytes,
        "share_of_peak": found.share_of_peak,
    }
    parts = {"memory": found.memory, "step": found.step, "totals": totals}
    golden.check_entry(
        "estimates.yaml", line, {name: rounded(part) for name, part in parts.items()}
    )
    assert found.bytes == sum(found.memory.values())
    assert found.seconds_per_step == sum(found.step.values()) - found.step["hidden"]


@pytest.mark.slow
def test_estimated_rates_are_within_a_third_of_published_ones(project):
    for row in published.PUBLISHED:
        rate, expected = published.rates(row)
        assert expected == pytest.approx(rate, rel=0.35), row
    assert published.compared() in (project / "benchmarks/RESULTS.md").read_text()


def test_the_best_settings_are_the_fastest_that_fit():
    settings = resolved(**SMALL)
    roomy = best_estimate(settings, 1, Instance("H100", 8, 85.0, 3350))
    assert roomy.fits and (roomy.batch_size, roomy.recompute) == (8, "0")
    narrow = best_estimate(settings, 1, Instance("H100", 8, roomy.bytes / 1e9 - 0.02, 3350))
    assert narrow.fits and narrow.bytes < roomy.bytes and narrow.global_batch_size == 64
    assert best_estimate(settings, 1, Instance("H100", 8, 1.0, 3350)) is None


def test_without_a_known_speed_the_best_settings_recompute_least_and_fill_the_memory():
    unknown = best_estimate(resolved(**SMALL), 1, Instance("unknown", 1, 85.0))
    assert (unknown.recompute, unknown.batch_size, unknown.step) == ("0", 64, {})


def test_figures_of_devices_and_machines_equal_the_recorded_ones():
    for name, peak in DEVICES["peaks"].items():
        assert device_peak(name) == (peak and peak * 1e12), name
    for name, figures in DEVICES["machines"].items():
        assert INSTANCES[name] == Instance(*figures)
    h100 = Instance("H100", 1, 85.0, bandwidth=3350)
    assert (h100.tflops(), replace(h100, peak=500).tflops()) == (989, 500)
    assert replace(h100, bandwidth=0).tflops() == 0


def test_the_memory_of_this_machine():
    machine = local_machine()
    megabytes = int(Path("/proc/meminfo").read_text().split()[1]) * 1024 / 1e6
    assert (machine.device, machine.devices) == ("cpu", 1)
    assert machine.memory * 1e3 == pytest.approx(megabytes, rel=0.01)
