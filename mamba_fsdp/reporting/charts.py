"""Describes the curves of runs as a plotly figure. The style of the figure is defined in page.html."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np

from mamba_fsdp.reporting.run_summary import RunSummary

MAX_POINTS = 600  # per curve; a curve with more points is reduced to means
RESTART_AXIS = "y99"  # the y axis of the vertical lines at restarts
VALIDATION_PREFIX = "val_"
EXCLUDED_METRICS = {
    "delaying_rank",
    "perplexity",  # it has the same shape as the loss
    "tokens",
    "val_perplexity",
    "val_share",
    "val_tokens",
}


def make_figure(runs: Sequence[RunSummary], tokenizers_differ: bool = False) -> dict[str, Any]:
    """Returns the figure as {data, layout}, with a chart for each metric and the curves of all runs in it.

    Curves of validations are dashed. The user can select the unit of the x axis. Therefore the meta of a trace contains
    its x values in all units: {run: name, steps: values, tokens: values, hours: values}. page.html selects from them.

    tokenizers_differ: whether the runs have different tokenizers. Then bits per byte come first, and the title of the
    loss chart contains a remark.
    """
    charts = list_charts(runs)
    if tokenizers_differ:
        charts.sort(key=lambda chart: chart != "bits_per_byte")
    data = [_restart_lines(run) for run in runs]
    layout: dict[str, Any] = {"annotations": []}
    for place, chart in enumerate(charts, 1):
        axis = str(place) if place > 1 else ""  # plotly names the axes x, x2, x3, ...
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
    """Returns the metrics to draw. A metric and its validation share a chart.

    Omits EXCLUDED_METRICS, metrics whose name begins with source_, metrics that are always 0, and metrics that equal an
    earlier one, such as the speed per device of a run on a single device.
    """
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
    """Returns a trace with a vertical line at each restart of a run. The trace is also the run's entry in the legend."""
    steps = [math.nan]
    heights = [math.nan]
    texts = [""]
    for event in run.restarts():
        steps += [event["step"], event["step"], math.nan]
        heights += [0, 1, math.nan]
        texts += [escape_html(f"restart from {event.get('from')}")] * 3
    trace = _make_trace(run, np.array(steps), np.array(heights))
    return trace | {"name": escape_html(run.name), "text": texts, "yaxis": RESTART_AXIS}


def _split_at_data_changes(run: RunSummary, metric: str) -> list[dict[int, float]]:
    """Returns the values of a metric as {step: value}, in parts that are drawn as separate lines.

    A validation metric is split where the validation data changed. Other metrics are not split.
    """
    column = run.metrics.get(metric, {})
    ends = [math.inf]
    if metric.startswith(VALIDATION_PREFIX):
        ends = [*run.find_validation_changes(metric), math.inf]
    parts = []
    for begin, end in pairwise([-1, *ends]):
        parts.append({step: value for step, value in column.items() if begin < step <= end})
    return list(filter(None, parts))


def _make_curve(run: RunSummary, metric: str, column: dict[int, float]) -> list[dict[str, Any]]:
    """Returns the traces of one curve.

    A long curve is reduced to means, with a band from the minimum to the maximum.
    """
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
    """Returns the values as a masked array of shape (rows, size). Padding and values that are not finite are masked."""
    filled = np.pad(np.array(values, float), (0, -len(values) % size), constant_values=math.nan)
    return np.ma.masked_invalid(filled.reshape(-1, size))


def _make_trace(run: RunSummary, steps: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    places: dict[str, Any] = {"run": run.name, "steps": _round_for_json(steps)}
    for axis in ("tokens", "hours"):
        places[axis] = _round_for_json(np.interp(steps, run.progress["steps"], run.progress[axis]))
    return {"meta": places, "y": _round_for_json(np.ma.filled(values, math.nan))}


def _round_for_json(values: Iterable[float]) -> list[float | None]:
    """Rounds the values to seven digits for JSON, more than a chart can show. Replaces NaN and infinity by None."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]


def escape_html(text: str) -> str:
    """Returns the last 80 characters of the text, escaped, because plotly interprets some HTML tags."""
    return escape(text[-80:], quote=False)


def initial_range(values: list[float]) -> dict[str, list[float]]:
    """Returns {range: [low, high]} for the initial view, without the highest and the lowest 1 % of the values.

    Returns {} if this range is not much smaller than the whole range.
    """
    known = np.ma.masked_invalid(values).compressed()
    if not len(known):
        return {}
    low, high = np.quantile(known, [0.01, 0.99]).tolist()
    margin = 0.06 * (high - low)
    is_narrow = np.ptp(known) > 1.5 * (high - low) > 0
    return {"range": [low - margin, high + margin]} if is_narrow else {}
