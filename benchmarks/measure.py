"""Contains the functions that the benchmarks share: they measure alternatives in turn, and format tables.

Only times of the same round are compared, because other programs on the machine then affect all alternatives equally.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

WARM_UP = 2  # steps before the first measured one


class Step(NamedTuple):
    """The measurements of one step."""

    seconds: float
    cpu_seconds: float  # total of all threads of the process
    peak: int  # peak memory of the process in MB
    returned: Any  # return value of the step


# In a process of steps_in_turn, this list contains the function that takes a step.
process_steps: list[Callable[[], Any]] = []


def _prepare(make_step: Callable[[], Callable[[], Any]]) -> None:
    step = make_step()
    for _ in range(WARM_UP):
        step()
    process_steps.append(step)


def _measure_step() -> Step:
    began = time.perf_counter()
    cpu_began = time.process_time()
    returned = process_steps[0]()
    seconds = time.perf_counter() - began
    cpu_seconds = time.process_time() - cpu_began
    return Step(seconds, cpu_seconds, _peak_megabytes(), returned)


def _step_in(pool: ProcessPoolExecutor) -> Step:
    return pool.submit(_measure_step).result()


def _peak_megabytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) // 1024


def steps_in_turn(
    makers: Mapping[str, Callable[[], Callable[[], Any]]], rounds: int
) -> dict[str, list[Step]]:
    """Takes steps of the alternatives in turn. Returns {name of an alternative: its Step of each round}.

    makers: {name of an alternative: a function that returns the function that takes a step}. Each alternative has a
    separate process."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = {}
        for name, make_step in makers.items():
            pool = ProcessPoolExecutor(1, context, _prepare, (make_step,))
            pools[name] = stack.enter_context(pool)
        wait([pool.submit(int) for pool in pools.values()])  # all processes have started
        return in_turn({name: partial(_step_in, pool) for name, pool in pools.items()}, rounds)


def command_line(description: str | None, rounds: int = 0) -> argparse.ArgumentParser:
    """Returns the parser of a benchmark's arguments. rounds: the default of --rounds; 0: there is no such option."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def in_turn(works: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Calls each function once per round. Returns {name: the results}."""
    found: dict[str, list[Any]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(work())
    return found


def in_processes(work: Callable[[Any], Any], jobs: Iterable[Any], processes: int) -> Iterator[Any]:
    """Yields work(job) for each job. processes: the number of processes that work at the same time."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(work, jobs)


def table(rows: Iterable[Mapping[str, object]]) -> str:
    """Formats rows as a Markdown table with aligned columns. The first row determines the columns."""
    rows = list(rows)
    names = list(rows[0])
    lines = [names]
    for row in rows:
        lines.append([str(row.get(name, "")).replace("|", "/") for name in names])
    widths = [max(len(cell) for cell in column) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    padded = []
    for cells in lines:
        padded.append(" | ".join(cell.ljust(width) for cell, width in zip(cells, widths)))
    return "\n".join(f"| {line} |" for line in padded)
