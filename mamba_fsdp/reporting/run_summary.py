"""Reads all records of a run: metrics, samples, settings, status, events and checkpoints."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mamba_fsdp.errors import UserError
from mamba_fsdp.run.layout import checkpoints_by_step
from mamba_fsdp.run.names import EVALUATIONS, METRICS, SETTINGS
from mamba_fsdp.run.records import (
    best_validation,
    flatten_numbers,
    read_entries,
    read_events,
    read_status,
)
from mamba_fsdp.storage.retry import list_names, read_text


@dataclass(frozen=True)
class RunSummary:
    """The records of a run. Some of them can be empty if the run is still training or was killed."""

    name: str
    # {metric: {step: value}}; NaN for a value that is not finite.
    metrics: dict[str, dict[int, float]]
    settings: dict[str, Any]  # {section.name: value}
    events: list[dict]
    # status: see read_status. last: the latest value of each metric. best: the metrics entry of the best validation.
    # samples: {step: texts}. checkpoints: the list of their steps.
    other_records: dict[str, Any]

    def restarts(self) -> list[dict]:
        """Returns the events of all starts except the first one."""
        return [event for event in self.events if event.get("event") == "started"][1:]

    def find_validation_changes(self, metric: str) -> list[int]:
        """Returns the steps at which a start had other validation data for this metric than the previous start.

        metric: for example val_loss, or val_source_loss/code for the source `code`.
        """
        starts = [event for event in self.events if "validation" in event]
        source = metric.partition("/")[2]
        data = [each["validation"].get(source) if source else each["validation"] for each in starts]
        return [
            start["step"]
            for start, (before, now) in zip(starts[1:], pairwise(data))
            if before != now
        ]

    @cached_property
    def progress(self) -> dict[str, np.ndarray]:
        """Returns three arrays, {"steps", "tokens", "hours"}: how far the run was at each report. Each array begins with 0.

        The hours include only training, without validations and saves.
        """
        tokens = self.metrics.get("tokens", {})
        speeds = self.metrics.get("tokens_per_second", {})
        counts = np.array([0, *tokens.values()])
        with np.errstate(all="ignore"):  # a damaged file can contain any numbers
            seconds = np.diff(counts) / [speeds.get(step, math.nan) for step in tokens]
        seconds[~np.isfinite(seconds)] = 0
        hours = np.cumsum([0, *seconds]) / 3600
        return {"steps": np.array([0, *tokens]), "tokens": counts, "hours": hours}


def name_runs(folders: Sequence[Path]) -> list[str]:
    """Returns a name for each run: its path relative to the deepest folder that contains all runs."""
    paths = [folder.resolve() for folder in folders]
    common = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(common)) for path in paths]


def summarise_run(folder: Path, name: str) -> RunSummary:
    """Reads the records of the run in `folder`. Raises UserError if metrics.jsonl has no entries or can't be read.

    name: the name of the run in the report.
    """
    entries = read_entries(folder / METRICS)
    if not entries:
        raise UserError(
            f"{folder}: {METRICS} has no entries yet; repeat the command after the first report of the run"
        )
    events = read_events(folder)
    metrics: dict[str, dict[int, float]] = {}
    latest: dict[str, Any] = {}
    for entry in entries + read_evaluations(folder):
        latest |= entry
        for metric, value in flatten_numbers(entry).items():
            column = metrics.setdefault(metric, {})
            column[entry["step"]] = math.nan if value is None else value
    other_records = {
        "status": read_status(folder),
        # Take the last step from the events too, because a run can end between two reports.
        "last": {
            **flatten_numbers(latest),
            "step": max(entry["step"] for entry in entries + events),
        },
        "best": best_validation(entries),
        "samples": {entry["step"]: entry["samples"] for entry in entries if "samples" in entry},
        "checkpoints": [*checkpoints_by_step(folder)],
    }
    settings = _read_settings(folder / SETTINGS)
    return RunSummary(name, metrics, settings, events, other_records)


def read_evaluations(folder: Path) -> list[dict]:
    """Returns the results of `evaluate --follow` for a run, sorted by step."""
    followed = folder / EVALUATIONS
    files = [followed / name for name in sorted(list_names(followed)) if name.endswith(".jsonl")]
    return sorted((entry for file in files for entry in read_entries(file)), key=itemgetter("step"))


def _read_settings(file: Path) -> dict[str, Any]:
    """Returns {section.name: value}, or {} if the file can't be read.

    Only scalars and lists of scalars are returned. A nested value could expand without limit through YAML's aliases.
    """
    settings = {}
    try:
        content = yaml.safe_load(read_text(file))
        content.pop("version", None)
        for section, part in content.items():
            for name, value in part.items():
                items = value if isinstance(value, list) else [value]
                if not any(isinstance(item, (dict, list, tuple)) for item in items):
                    settings[f"{section}.{name}"] = value
    except Exception:  # PyYAML raises many kinds of exceptions
        return {}
    return settings
