"""Measures alternatives in turn, within one run, and prints tables: what the benchmarks share.

Only ratios of one run are compared, round by round: other programs on the machine then disturb all alternatives alike.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

WARM_UP = 2  # steps that are not counted


class Step(NamedTuple):
    """What one step took."""

    seconds: float
    cpu_seconds: float  # of all threads of the process
    peak: int  # MB that it has held at most
    returned: Any  # by the step


class Worker:
    """A process of its own that takes a step whenever it is asked to."""

    def __init__(self, make_step: Callable[[], Callable[[], Any]]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make_step), daemon=True)
        self.process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        self.connection.recv()

    def step(self) -> Step:
        self.connection.send("step")
        return self.connection.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(connection: Any, make_step: Callable[[], Callable[[], Any]]) -> None:
    step = make_step()
    for _ in range(WARM_UP):
        step()
    connection.send("ready")
    while connection.recv():
        began = time.perf_counter()
        cpu_began = time.process_time()
        returned = step()
        seconds = time.perf_counter() - began
        cpu_seconds = time.process_time() - cpu_began
        connection.send(Step(seconds, cpu_seconds, _most_megabytes(), returned))


def _most_megabytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) // 1024


def steps_in_turn(
    makers: Mapping[str, Callable[[], Callable[[], Any]]], rounds: int
) -> dict[str, list[Step]]:
    """Returns {name: a step of each round}. Each maker is called in a process of its own and returns a function that
    takes a step."""
    with ExitStack() as stack:
        workers = {}
        for name, make_step in makers.items():
            workers[name] = Worker(make_step)
            stack.callback(workers[name].end)
        for worker in workers.values():
            worker.wait_until_ready()
        return in_turn({name: worker.step for name, worker in workers.items()}, rounds)


def command_line(description: str | None, rounds: int = 0) -> argparse.ArgumentParser:
    """Returns the parser of a program's words; with `rounds`, so many by default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def in_turn(works: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Returns {name: what each call returned}, from one call of each in every round."""
    found: dict[str, list[Any]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(work())
    return found


def in_processes(work: Callable[[Any], Any], jobs: Iterable[Any], processes: int) -> Iterator[Any]:
    """Yields the result of `work` for each job. So many processes work at the same time."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(work, jobs)


def times_as_fast(own: Iterable[float], base: Iterable[float]) -> float:
    """Returns how many times as fast as `base` something is: the median of the rounds' ratios of seconds."""
    return statistics.median(theirs / ours for ours, theirs in zip(own, base))


def table(rows: Iterable[Mapping[str, object]]) -> str:
    """Returns Markdown with aligned columns, which are the first row's."""
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
