"""Calculates what failures of nodes cost a training, and how often to save because of them.

All times are in seconds, unless a name says hours. Failures are independent of each other and equally likely at all times.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Costs:
    """The seconds that saves and failures take. The defaults are assumptions, not measurements."""

    save: float = 1.0  # training waits during a save
    write: float = 60.0  # from the start of a save to its commit; training continues meanwhile
    recovery: float = 30.0  # from the failure of a node to the next step, if a spare replaces it
    queue: float = 300.0  # added to the recovery without spare nodes: the job is queued again


@dataclass
class Interval:
    """A checkpoint interval, and the expected share of time in steps with it."""

    name: str
    seconds: float
    steps: int
    goodput: float
    goodput_without_spares: float


def young_interval(save: float, between: float) -> float:
    """Returns the checkpoint interval that costs least to first order: sqrt(2 * save * between).

    It minimises save / interval + interval / (2 * between), the share of time that is lost to saves and to repeated steps.
    J. W. Young, A first order approximation to the optimum checkpoint interval, Communications of the ACM 17 (9), 1974.
    """
    return math.sqrt(2 * save * between)


def daly_interval(save: float, between: float) -> float:
    """Returns the checkpoint interval that costs least if failures are not rare compared with saves.

    With x = save / (2 * between) it is sqrt(2 * save * between) * (1 + sqrt(x) / 3 + x / 9) - save, or `between` if x is
    1 or more. It approximates the maximum of `goodput`.
    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
    Systems 22 (3), 2006.
    """
    ratio = save / (2 * between)
    if ratio >= 1:
        return between
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return young_interval(save, between) * series - save


def goodput(interval: float, save: float, lost: float, between: float) -> float:
    """Returns the expected share of time in steps that are not repeated later.

    lost: what a failure costs besides the steps since the last save. In Daly's model, in which a node can also fail during
    the recovery, the share is interval / (between * exp(lost / between) * (exp((interval + save) / between) - 1)). If
    failures are rare, this means that an interval costs `save`, and a failure half an interval and `lost`.
    """
    cycle = (interval + save) / between
    # Powers of e with a negative exponent, because the others overflow if failures are frequent.
    survival = math.exp(-cycle - lost / between)
    return interval / between * survival / -math.expm1(-cycle)


def find_intervals(
    costs: Costs, between: float, seconds_per_step: float, given_steps: int
) -> Iterator[Interval]:
    """Yields Young's interval, Daly's, and the given one."""
    # A save waits until the one before it is written.
    least = max(costs.write, seconds_per_step)
    seconds_by_name = {
        "Young": max(least, young_interval(costs.save, between)),
        "Daly": max(least, daly_interval(costs.save, between)),
        "as given": given_steps * seconds_per_step,
    }
    # A failure during a save also costs the steps since the save before it.
    lost = costs.recovery + max(0.0, costs.write - costs.save)
    for name, seconds in seconds_by_name.items():
        interval = max(least, seconds)
        yield Interval(
            name,
            seconds,
            steps=round(seconds / seconds_per_step),
            goodput=goodput(interval, costs.save, lost, between),
            goodput_without_spares=goodput(interval, costs.save, lost + costs.queue, between),
        )
