"""Tests mamba_fsdp.planning.failures: the cost of failures, and the checkpoint interval with the lowest cost."""

import numpy as np
import pytest

from mamba_fsdp.planning import failures
from mamba_fsdp.planning.failures import Costs, find_intervals, goodput


@pytest.mark.parametrize("save, between", [(1.0, 900_000.0), (30.0, 20_000.0), (120.0, 3600.0)])
def test_the_formulas_find_the_interval_that_costs_least(save, between):
    """The intervals of Young and Daly have the lowest cost among 10,000 intervals between the time of a save and the
    time between failures."""
    intervals = np.geomspace(save, between, 10_000)
    lost = save / intervals + intervals / (2 * between)
    assert failures.young_interval(save, between) == pytest.approx(
        intervals[lost.argmin()], rel=2e-3
    )
    shares = np.array([goodput(interval, save, 30.0, between) for interval in intervals])
    daly = failures.daly_interval(save, between)
    assert daly == pytest.approx(intervals[shares.argmax()], rel=2e-3)
    assert goodput(daly, save, 30.0, between) == pytest.approx(shares.max(), rel=1e-6)
    assert failures.daly_interval(2 * between, between) == between


def test_goodput_equals_a_simulation_of_failures():
    """The calculated goodput equals the goodput of 200,000 simulated failures.

    In the simulation, nodes also fail during recoveries, and training resumes from the newest committed checkpoint.
    """
    costs = Costs(save=5.0, write=40.0, recovery=60.0, queue=300.0)
    _, _, given = find_intervals(costs, 1800.0, 2.0, 150)
    uptimes = np.random.default_rng(0).exponential(1800.0, 200_000)
    saves = np.arange(100)
    commits = 300.0 + saves * (300.0 + costs.save) + costs.write
    for recovery, expected in ((60.0, given.goodput), (360.0, given.goodput_without_spares)):
        committed = np.searchsorted(commits, uptimes - recovery)
        assert 300.0 * committed.sum() / uptimes.sum() == pytest.approx(expected, rel=0.01)


def test_no_interval_is_shorter_than_a_step_or_the_write_of_a_checkpoint():
    for seconds_per_step, steps in ((2.0, [30, 30, 500]), (100.0, [1, 1, 500])):
        intervals = find_intervals(Costs(), 100.0, seconds_per_step, 500)
        assert [interval.steps for interval in intervals] == steps
