"""Calculates how much time failures of nodes cost, and how often to save checkpoints because of them.

Times are in seconds. The model assumes that failures are independent of each other and equally likely at all times.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Costs:
    """The seconds that saving a checkpoint and recovering from a failure take. The defaults are assumptions, not
    measurements."""

    save: float = 1.0  # seconds during which a save interrupts training
    write: float = 60.0  # seconds until a save is committed; training continues during it
    recovery: float = 30.0  # seconds until the next step after a node has failed, with a spare node
    queue: float = 300.0  # additional seconds without spare nodes: the job is queued again


@dataclass
class Interval:
    """A checkpoint interval, and the fraction of time that is expected to remain for steps (goodput)."""

    name: str
    seconds: float
    steps: int
    goodput: float
    goodput_without_spares: float


def young_interval(save: float, between: float) -> float:
    """Returns the checkpoint interval that costs least, to first order: sqrt(2 * save * between).

    This interval minimizes save / interval + interval / (2 * between), the fraction of time that saves and repeated
    steps take. save: seconds per save. between: mean time between failures.

    J. W. Young, A first order approximation to the optimum checkpoint interval, Communications of the ACM 17 (9), 1974.
    """
    return math.sqrt(2 * save * between)


def daly_interval(save: float, between: float) -> float:
    """Returns the checkpoint interval that costs least, also if failures are not rare compared with saves.

    With x = save / (2 * between), it is sqrt(2 * save * between) * (1 + sqrt(x) / 3 + x / 9) - save, or `between` if x
    is 1 or more. This is approximately the interval at which `goodput` is largest.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
    Systems 22 (3), 2006.
    """
    ratio = save / (2 * between)
    if ratio >= 1:
        return between
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return young_interval(save, between) * series - save


def goodput(interval: float, save: float, lost: float, between: float) -> float:
    """Returns the expected fraction of time for steps that are not repeated later.

    interval: seconds from one save to the next. save: seconds per save. lost: seconds that a failure costs in addition
    to the steps since the last save. between: mean time between failures.

    In Daly's model, in which nodes can also fail during a recovery, the fraction is interval / (between * exp(lost /
    between) * (exp((interval + save) / between) - 1)). If failures are rare, this means that each interval costs
    `save`, and each failure costs half an interval and `lost`.
    """
    cycle = (interval + save) / between
    # The exponents are negative, because powers with positive exponents overflow if failures are frequent.
    survival = math.exp(-cycle - lost / between)
    return interval / between * survival / -math.expm1(-cycle)


def find_intervals(
    costs: Costs, between: float, seconds_per_step: float, given_steps: int
) -> Iterator[Interval]:
    """Yields the intervals of Young and Daly, and the given one.

    between: mean time between failures of any node. given_steps: the configured interval in steps."""
    # A save can start only after the previous one has been written.
    min_seconds = max(costs.write, seconds_per_step)
    seconds_by_name = {
        "Young": max(min_seconds, young_interval(costs.save, between)),
        "Daly": max(min_seconds, daly_interval(costs.save, between)),
        "as given": given_steps * seconds_per_step,
    }
    # If a node fails while a checkpoint is written, the steps since the previous checkpoint are lost too.
    lost = costs.recovery + max(0.0, costs.write - costs.save)
    for name, seconds in seconds_by_name.items():
        interval = max(min_seconds, seconds)
        yield Interval(
            name,
            seconds,
            steps=round(seconds / seconds_per_step),
            goodput=goodput(interval, costs.save, lost, between),
            goodput_without_spares=goodput(interval, costs.save, lost + costs.queue, between),
        )
