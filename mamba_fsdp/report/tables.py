"""Makes the tables of a report: what the records of runs say beside their curves."""

import json
from collections.abc import Sequence
from typing import Any

from mamba_fsdp.report.run_summary import RunSummary

Row = dict[str, Any]  # {column: content}; the page leaves out columns that are empty in all rows

LATEST = (
    "step",
    "tokens",
    "loss",
    "val_loss",
    "val_perplexity",
    "val_bits_per_byte",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "goodput",
)


def make_tables(runs: Sequence[RunSummary]) -> dict[str, list[Row]]:
    """Returns {title: rows}."""
    every = settings(runs)
    differing = [row for row in every if len({row[run.name] for run in runs}) > 1]
    return {
        "Runs": [overview(run) for run in runs],
        "Samples": [row for run in runs for row in samples(run)],
        "Settings that differ": differing,
        "All settings": every,
        "Data": [row for run in runs for row in mixture(run)],
        "Starts, stops and what happened": [row for run in runs for row in events(run)],
        "Checkpoints": [row for run in runs for row in checkpoints(run)],
    }


def overview(run: RunSummary) -> Row:
    status = {name: run.status.get(name) for name in ("status", "reason")}
    latest = {metric: run.last.get(metric) for metric in LATEST}
    return {"run": run.name, **status, **latest, "restarts": len(run.restarts())}


def samples(run: RunSummary) -> list[Row]:
    """Returns the texts that the model wrote, the newest first."""
    rows = []
    for step, texts in reversed(run.samples.items()):
        for text in texts if isinstance(texts, list) else [texts]:
            rows.append({"run": run.name, "step": step, "text": str(text).strip()})
    return rows


def settings(runs: Sequence[RunSummary]) -> list[Row]:
    """Returns each setting with its value in each run, as text."""
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        row = {"setting": name}
        for run in runs:
            value = run.settings.get(name, "")
            row[run.name] = value if isinstance(value, str) else json.dumps(value, default=str)
        rows.append(row)
    return rows


def mixture(run: RunSummary) -> list[Row]:
    """Returns what the run has read from each source."""
    prefix = "source_tokens/"
    tokens = {key: count or 0 for key, count in run.last.items() if key.startswith(prefix)}
    total = sum(tokens.values()) or 1
    rows = []
    for key, count in tokens.items():
        source = key.removeprefix(prefix)
        epochs = run.last.get(f"source_epochs/{source}")
        share = count / total
        row = {"run": run.name, "source": source, "tokens": count, "share": share, "epochs": epochs}
        rows.append(row)
    return rows


def events(run: RunSummary) -> list[Row]:
    """Returns all events except checkpoints."""
    others = [event for event in run.events if event.get("event") != "checkpoint"]
    return [{"run": run.name, **event} for event in others]


def checkpoints(run: RunSummary) -> list[Row]:
    """Returns the checkpoints that are kept, with what the events say of their writing."""
    written = {event["step"]: event for event in run.events if event.get("event") == "checkpoint"}
    return [{"run": run.name, "step": step, **written.get(step, {})} for step in run.checkpoints]
