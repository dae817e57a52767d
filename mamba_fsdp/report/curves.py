"""The records of a run as plain data: curves of its metrics, settings, events, checkpoints."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mamba_fsdp.errors import UserError
from mamba_fsdp.run.layout import committed, step_of
from mamba_fsdp.run.names import CHECKPOINTS, METRICS, SETTINGS
from mamba_fsdp.run.records import latest, numbers_of, read, read_events, read_status

BUCKETS = 500  # points of a long curve; each stands for an equal number of neighbouring values
NO_CURVES = {"tokens", "val_tokens", "val_share", "delaying_rank"}


def name_runs(folders: Sequence[Path]) -> list[str]:
    """Returns the paths of the runs relative to the deepest folder that contains all of them."""
    paths = [folder.resolve() for folder in folders]
    common = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(common)) for path in paths]


def summarise_run(folder: Path) -> dict[str, Any]:
    """Returns all records of a run, for JSON. Raises UserError if nothing is recorded.

    curves: {metric: see `curve`} of the metrics that are not always 0; last: the latest value of each metric; axes:
    steps, and the tokens seen up to each of them; samples: {step: the texts that the model wrote}; settings: by
    section.name.
    """
    if not folder.exists():
        raise UserError(f"{folder}: there is no such folder")
    if not (folder / METRICS).exists() and not (folder / CHECKPOINTS).exists():
        raise UserError(f"{folder}: holds no {METRICS}; is it a run folder?")
    entries = read(folder / METRICS)
    if not entries:
        raise UserError(
            f"{folder}: nothing is recorded yet; {METRICS} begins with the first report"
        )
    columns: dict[str, dict[int, float]] = {}  # {metric: {step: value}}
    for entry in entries:
        for metric, value in numbers_of(entry).items():
            column = columns.setdefault(metric, {})
            column[entry["step"]] = math.nan if value is None else value
    curves = {}
    for metric, column in columns.items():
        steps = [*column]
        values = [*column.values()]
        is_drawn = metric not in NO_CURVES and not metric.startswith("source_")
        if is_drawn and any(values):
            curves[metric] = curve(steps, values)
    return {
        "curves": curves,
        "last": {"step": entries[-1]["step"], **numbers_of(latest(folder))},
        "axes": _axes(columns.get("tokens", {})),
        "samples": {entry["step"]: entry["samples"] for entry in entries if "samples" in entry},
        "settings": _read_settings(folder / SETTINGS),
        "folder": str(folder),
        "status": read_status(folder),
        "events": read_events(folder),
        "checkpoints": [step_of(path.name) for path in committed(folder / CHECKPOINTS)],
    }


def _read_settings(file: Path) -> dict[str, Any]:
    """Returns {section.name: value}, or {} if the file can't be read. Only plain values and lists of them are returned:
    with YAML's aliases, other values could grow without limit."""
    settings = {}
    try:
        content = yaml.safe_load(file.read_text())
        content.pop("version", None)
        for section, part in content.items():
            for name, value in part.items():
                items = value if isinstance(value, list) else [value]
                if not any(isinstance(item, (dict, list, tuple)) for item in items):
                    settings[f"{section}.{name}"] = value
    except Exception:  # PyYAML raises many kinds of error
        return {}
    return settings


def _axes(tokens: dict[int, float]) -> dict[str, list]:
    places = np.unique(np.linspace(0, len(tokens), 2 * BUCKETS, dtype=int))
    steps = np.array([0, *tokens])
    counts = np.array([0, *tokens.values()])
    return {"step": steps[places].tolist(), "tokens": counts[places].tolist()}


def curve(steps: Sequence[int], values: Sequence[float]) -> dict[str, list]:
    """Returns {steps, mean, low, high}, with None for values that are not finite.

    In a short curve, mean has the values themselves, and low and high are empty. A long curve is cut into BUCKETS: each
    has its last step, and the mean, the least and the greatest of its finite values.
    """
    array = np.array(values, dtype=float)
    array[~np.isfinite(array)] = np.nan
    if len(steps) <= 2 * BUCKETS:
        return {"steps": list(steps), "mean": _plain(array, digits=17), "low": [], "high": []}
    starts = np.linspace(0, len(steps), BUCKETS, endpoint=False, dtype=int)
    ends = [*(starts[1:] - 1), -1]
    with np.errstate(invalid="ignore"):
        sums = np.add.reduceat(np.nan_to_num(array), starts)
        means = sums / np.add.reduceat(np.isfinite(array), starts, dtype=int)
    return {
        "steps": np.array(steps)[ends].tolist(),
        "mean": _plain(means, digits=7),
        "low": _plain(np.fmin.reduceat(array, starts), digits=17),
        "high": _plain(np.fmax.reduceat(array, starts), digits=17),
    }


def _plain(values: np.ndarray, digits: int) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
