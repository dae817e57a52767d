"""What a run has left to look at, as plain data: curves of its metrics, settings, events, checkpoints, samples."""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mamba_fsdp.errors import UserError
from mamba_fsdp.report.records import numbers_of, read, read_events, read_status
from mamba_fsdp.run_layout import CHECKPOINTS, GENERATED, METRICS, SETTINGS, committed, step_of

BUCKETS = 500  # points of a curve that has more than twice as many; each stands for neighbours of equal number
NO_CURVES = {"tokens", "val_tokens", "val_share", "slowest_rank"}


def names_of(folders: Sequence[Path]) -> list[str]:
    """What their paths differ by: a and b of x/a/train and x/b/train; of one, its own name."""
    paths = [folder.resolve().parts for folder in folders]
    for end in (0, -1):
        while (
            len(paths) > 1 and min(map(len, paths)) > 1 and len({path[end] for path in paths}) == 1
        ):
            paths = [path[1:] if end == 0 else path[:-1] for path in paths]
    return ["/".join(path) if len(paths) > 1 else path[-1] for path in paths]


def look_at(folder: Path) -> dict[str, Any]:
    """All of a run, for JSON. curves: see `curve`, by metric; last: the latest value of each; axes: at the same places
    the step, the tokens up to it and, where the metrics tell, the hours of training; settings: by section.name.
    Raises UserError where nothing is recorded."""
    if not (folder / METRICS).exists() and not (folder / CHECKPOINTS).exists():
        raise UserError(f"{folder}: holds no {METRICS}; is it a run folder?")
    entries = read(folder / METRICS)
    if not entries:
        raise UserError(
            f"{folder}: nothing is recorded yet; {METRICS} begins with the first report"
        )
    columns: dict[str, tuple[list, list]] = {}
    for entry in entries:
        for metric, value in numbers_of(entry).items():
            steps, values = columns.setdefault(metric, ([], []))
            steps.append(entry["step"])
            values.append(math.nan if value is None else value)
    settings = {}
    with contextlib.suppress(
        OSError, ValueError, AttributeError, RecursionError, StopIteration, yaml.YAMLError
    ):
        settings = {
            f"{section}.{key}": value
            for section, part in yaml.safe_load((folder / SETTINGS).read_text()).items()
            for key, value in part.items()  # those that hold others may grow without end, by aliases
            if not any(
                isinstance(inner, (dict, list, tuple))
                for inner in (value if isinstance(value, list) else [value])
            )
        }
    last = {
        metric: values[-1] for metric, (_, values) in columns.items() if math.isfinite(values[-1])
    }
    return {
        "curves": {
            metric: curve(*column) for metric, column in columns.items() if metric not in NO_CURVES
        },
        "last": {"step": entries[-1]["step"], **last},
        "axes": _axes(columns),
        "settings": settings,
        "folder": str(folder),
        "status": read_status(folder) or {},
        "events": read_events(folder),
        "checkpoints": [step_of(path.name) for path in committed(folder / CHECKPOINTS)],
        "samples": read(folder / GENERATED),
    }


def _axes(columns):
    """Hours: each interval's tokens over its rate."""
    (steps, tokens), (_, rates) = (
        columns.get(name, ([], [])) for name in ("tokens", "tokens_per_second")
    )
    axes = {"step": np.array([0, *steps]), "tokens": np.array([0, *tokens])}
    if rates and len(rates) == len(tokens):
        with np.errstate(all="ignore"):
            axes["hours"] = np.cumsum(np.diff([0.0, 0.0, *tokens]) / np.array([1.0, *rates])) / 3600
    kept = np.unique(np.linspace(0, len(steps), 2 * BUCKETS, dtype=int))
    return {name: axis[kept].tolist() for name, axis in axes.items()}


def curve(steps: Sequence[int], values: Sequence[float]) -> dict[str, list]:
    """{steps, mean}, None where it is not finite. Of a long one, for each of BUCKETS its last step, and besides the
    mean what it hides: low and high."""
    array = np.array(values, dtype=float)
    array[~np.isfinite(array)] = np.nan
    if len(steps) <= 2 * BUCKETS:
        return {"steps": list(steps), "mean": _plain(array), "low": [], "high": []}
    cuts = np.linspace(0, len(steps), BUCKETS, endpoint=False, dtype=int)
    with np.errstate(invalid="ignore"):
        means = np.add.reduceat(np.nan_to_num(array), cuts) / np.add.reduceat(
            np.isfinite(array), cuts, dtype=int
        )
    return {
        "steps": np.array(steps)[[*(cuts[1:] - 1), -1]].tolist(),
        "mean": _plain(means, 7),
        "low": _plain(np.fmin.reduceat(array, cuts)),
        "high": _plain(np.fmax.reduceat(array, cuts)),
    }


def _plain(values, digits=17):
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
