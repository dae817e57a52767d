"""The profile of a few steps: a Chrome trace in the run folder, and what it says of where the time goes."""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mamba_fsdp.data.loader import Loader
from mamba_fsdp.run_layout import PROFILE

DATA, TOP = (
    "waiting for data",
    5,
)  # what waiting is called in the trace; how many operators are told
TALKS = re.compile("nccl|gloo|c10d", re.IGNORECASE)
Event = dict[str, Any]


def make_profiler(
    run_folder: Path, rank: int, loader: Loader, say: Callable[[str], None]
) -> torch.profiler.profile:
    """Writes profile/rank_R.json, a trace of steps 5 to 7 of this start for Perfetto or chrome://tracing, and says on
    rank 0 what is in it; on a GPU the memory's history is recorded for a snapshot where it runs out."""

    def write(profile: torch.profiler.profile) -> None:
        path = run_folder / PROFILE / f"rank_{rank}.json"
        path.parent.mkdir(exist_ok=True)
        profile.export_chrome_trace(str(path))
        if rank == 0:
            say("\n".join(summary(json.loads(path.read_text())["traceEvents"])))

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or each of its probes is a line on stderr
    vars(loader)["step"] = torch.profiler.record_function(DATA)(loader.step)
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    # The first steps compile kernels and fill caches.
    steps = torch.profiler.schedule(wait=3, warmup=1, active=3, repeat=1)
    return torch.profiler.profile(schedule=steps, on_trace_ready=write, record_shapes=True)


def summary(events: Iterable[Event]) -> Iterator[str]:
    """Lines on the events of a Chrome trace: the shares of the steps' time in which a device computes, else
    communicates (exposed), else the host waits for data, else does something else; then what took most: kernels, or
    where there are none (the CPU is the device) operators without those that they call."""
    found: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            found[event.get("cat", "")].append(event)
    notes, kernels, operators = found["user_annotation"], found["kernel"], found["cpu_op"]
    steps = [event for event in notes if event["name"].startswith("ProfilerStep")]
    if not steps:
        return
    nested = [] if kernels else list(_nested(operators))
    device = kernels + found["gpu_memcpy"] + found["gpu_memset"] if kernels else operators
    talks = [
        event for event in (device if kernels else operators + notes) if TALKS.search(event["name"])
    ]
    others = set(map(id, talks)).union(
        *(callers for callers, event in nested if TALKS.search(event["name"]))
    )
    kinds = {
        "compute": [event for event in device if id(event) not in others],
        "exposed communication": talks,
        "data": [event for event in notes if event["name"] == DATA],
        "host": steps,
    }
    first, last = (
        min(event["ts"] for event in steps),
        max(event["ts"] + event["dur"] for event in steps),
    )
    known, before, shares = list[Event](), 0.0, []
    for name, chosen in kinds.items():
        known += chosen
        inside = _covered(
            [(event["ts"], event["ts"] + event["dur"]) for event in known], first, last
        )
        shares.append(f"{name} {(inside - before) / (last - first):.0%}")
        before = inside
    yield f"profile    {len(steps)} steps of {(last - first) / len(steps) / 1e6:.3f} s: {', '.join(shares)}"

    taken, names = Counter[str](), {id(event): event["name"] for event in operators}
    calls = Counter(event["name"] for event in kernels or operators)
    for event in kernels or operators:
        taken[event["name"]] += event["dur"]
    for callers, event in nested:
        taken[names[callers[-1]]] -= event["dur"]
    for name, microseconds in taken.most_common(TOP):
        seconds = microseconds / 1e6 / len(steps)
        yield f"           {seconds:8.4f} s a step, {calls[name] / len(steps):7,.0f} x {name[:45]}"


def _covered(spans: list[tuple[float, float]], first: float, last: float) -> float:
    """How much of the time from first to last lies in a span (start, end)."""
    starts, ends = np.clip(np.array(sorted(spans) or [(first, first)]).T, first, last)
    reached = np.maximum.accumulate(ends)
    return float(reached[-1] - starts[0] - np.maximum(0, starts[1:] - reached[:-1]).sum())


def _nested(events: Iterable[Event]) -> Iterator[tuple[tuple[int, ...], Event]]:
    """(the ids of the operators around it in its thread, the operator) of each that others call."""
    callers: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        stack = callers[event["tid"]]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            stack.pop()
        if stack:
            yield tuple(map(id, stack)), event
        stack.append(event)
