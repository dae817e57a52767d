"""Describes the curves of runs as a figure of plotly. How it looks is the page's own (page.html)."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np

from mamba_fsdp.reporting.run_summary import RunSummary

MAX_POINTS = 600  # of a curve; a longer curve is drawn by means
RESTART_AXIS = "y99"  # the axis of the lines at restarts
VALIDATION_PREFIX = "val_"
EXCLUDED_METRICS = {
    "delaying_rank",
    "perplexity",  # it would draw the loss again
    "tokens",
    "val_perplexity",
    "val_share",
    "val_tokens",
}


def make_figure(runs: Sequence[RunSummary], tokenizers_differ: bool = False) -> dict[str, Any]:
    """Returns {data, layout}: a chart of each metric, with the curves of all runs; validations are dashed.

    The page takes a trace's x from its meta: {run: name, steps, tokens, hours: its places on each x axis}.
    """
    charts = list_charts(runs)
    if tokenizers_differ:
        charts.sort(key=lambda chart: chart != "bits_per_byte")
    data = [_restart_lines(run) for run in runs]
    layout: dict[str, Any] = {"annotations": []}
    for place, chart in enumerate(charts, 1):
        axis = str(place) if place > 1 else ""  # plotly's axes are x, x2, x3, ...
        values: list[float] = []
        for run in runs:
            for metric in (chart, VALIDATION_PREFIX + chart):
                values += run.metrics.get(metric, {}).values()
                for column in _split_at_data_changes(run, metric):
                    for trace in _make_curve(run, metric, column):
                        data.append(trace | {"xaxis": f"x{axis}", "yaxis": f"y{axis}"})
        text = f"<b>{escape_html(chart.replace('_', ' '))}</b>"
        if tokenizers_differ and chart == "loss":
            text += "  per token of different tokenizers: not comparable"
        title = {"text": text, "xref": f"x{axis} domain", "yref": f"y{axis} domain"}
        layout["annotations"].append(title)
        layout[f"xaxis{axis}"] = {"matches": "x"} if axis else {}  # all charts are zoomed together
        layout[f"yaxis{axis}"] = initial_range(values)
    return {"data": data, "layout": layout}


def list_charts(runs: Iterable[RunSummary]) -> list[str]:
    """Returns the metrics to draw, without those that are always 0 or equal to an earlier one, such as the speed of a
    single device. A metric and its validation share a chart."""
    charts = []
    for run in runs:
        drawn: list[dict[int, float]] = []
        for metric, column in run.metrics.items():
            is_drawn = metric not in EXCLUDED_METRICS and not metric.startswith("source_")
            if is_drawn and any(column.values()) and column not in drawn:
                drawn.append(column)
                charts.append(metric.removeprefix(VALIDATION_PREFIX))
    return list(dict.fromkeys(charts))


def _restart_lines(run: RunSummary) -> dict[str, Any]:
    """Returns a line at each restart, from 0 to 1 on an axis of its own; the legend shows it for the run."""
    steps = [math.nan]
    heights = [math.nan]
    texts = [""]
    for event in run.restarts():
        steps += [event["step"], event["step"], math.nan]
        heights += [0, 1, math.nan]
        texts += [escape_html(f"restart from {event.get('from')}")] * 3
    look = {"name": escape_html(run.name), "text": texts, "yaxis": RESTART_AXIS}
    return _make_trace(run, np.array(steps), np.array(heights)) | look


def _split_at_data_changes(run: RunSummary, metric: str) -> list[dict[int, float]]:
    """Returns the values of a metric; a validation's in parts, of different data, which no line joins."""
    column = run.metrics.get(metric, {})
    ends = [math.inf]
    if metric.startswith(VALIDATION_PREFIX):
        ends = [*run.find_validation_changes(metric), math.inf]
    parts = []
    for begin, end in pairwise([-1, *ends]):
        parts.append({step: value for step, value in column.items() if begin < step <= end})
    return list(filter(None, parts))


def _make_curve(run: RunSummary, metric: str, column: dict[int, float]) -> list[dict[str, Any]]:
    """Returns the curve of a metric; a long one as means, with a band from the least to the greatest values."""
    size = math.ceil(len(column) / MAX_POINTS)
    steps = _split_into_rows([*column], size).max(axis=1)
    values = _split_into_rows([*column.values()], size)
    curve = _make_trace(run, steps, values.mean(axis=1)) | {
        "name": escape_html(run.name),
        "line": {},
    }
    if metric.startswith(VALIDATION_PREFIX):
        curve |= {"name": escape_html(f"{run.name} validation"), "line": {"dash": "dash"}}
    if size == 1:
        return [curve]
    known = values.count(axis=1) > 0
    around = [values.min(axis=1)[known], values.max(axis=1)[known][::-1]]
    there_and_back = [steps[known], steps[known][::-1]]
    band = _make_trace(run, np.ma.concatenate(there_and_back), np.ma.concatenate(around))
    return [band | {"fill": "toself"}, curve]


def _split_into_rows(values: list[float], size: int) -> np.ma.MaskedArray:
    """Returns the values in rows of `size`, with the padding of the last row and values that are not finite masked."""
    filled = np.pad(np.array(values, float), (0, -len(values) % size), constant_values=math.nan)
    return np.ma.masked_invalid(filled.reshape(-1, size))


def _make_trace(run: RunSummary, steps: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    places: dict[str, Any] = {"run": run.name, "steps": _round_for_json(steps)}
    for axis in ("tokens", "hours"):
        places[axis] = _round_for_json(np.interp(steps, run.progress["steps"], run.progress[axis]))
    return {"meta": places, "y": _round_for_json(np.ma.filled(values, math.nan))}


def _round_for_json(values: Iterable[float]) -> list[float | None]:
    """Returns the values for JSON, in seven digits, more than a chart shows."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]


def escape_html(text: str) -> str:
    """Returns the end of the text for plotly, which reads some tags of HTML."""
    return escape(text[-80:], quote=False)


def initial_range(values: list[float]) -> dict[str, list[float]]:
    """Returns {range}: all but the most extreme 1 % at each end; {} if that differs little from the whole."""
    known = np.ma.masked_invalid(values).compressed()
    if not len(known):
        return {}
    low, high = np.quantile(known, [0.01, 0.99]).tolist()
    margin = 0.06 * (high - low)
    is_narrow = np.ptp(known) > 1.5 * (high - low) > 0
    return {"range": [low - margin, high + margin]} if is_narrow else {}
