"""Describes the curves of runs as a figure of plotly. How it looks is the page's own (page.html)."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import numpy as np

from mamba_fsdp.report.run_summary import RunSummary

BUCKETS = 500  # points of a long curve; each stands for an equal number of neighbouring values
RESTARTS = "y99"  # the axis of the lines at restarts
VALIDATION = "val_"
NOT_DRAWN = {
    "delaying_rank",
    "perplexity",  # draws the loss again
    "tokens",
    "val_perplexity",
    "val_share",
    "val_tokens",
}


def make_figure(runs: Sequence[RunSummary], tokenizers_differ: bool = False) -> dict[str, Any]:
    """Returns {data, layout}: a chart of each metric, with the curves of all runs, those of validations dashed.

    The page makes a trace's x of its `meta`: {run: its number, steps, tokens, hours: its points on each x axis}.
    """
    data = [_restarts(run, number) for number, run in enumerate(runs)]
    layout: dict[str, Any] = {"annotations": []}
    charts = name_charts(runs)
    if tokenizers_differ:
        charts.sort(key=lambda chart: chart != "bits_per_byte")
    for chart_number, chart in enumerate(charts, 1):
        axis = str(chart_number) if chart_number > 1 else ""  # plotly's axes are x, x2, x3, ...
        axes = {"xaxis": f"x{axis}", "yaxis": f"y{axis}"}
        values: list[float] = []
        for number, run in enumerate(runs):
            for metric in (chart, VALIDATION + chart):
                values += run.metrics.get(metric, {}).values()
                for trace in _curve(run, number, metric):
                    data.append(trace | axes)
        title = f"<b>{as_text(chart.replace('_', ' '))}</b>"
        if tokenizers_differ and chart == "loss":
            title += "  per token of different tokenizers: not comparable"
        place = {"xref": f"x{axis} domain", "yref": f"y{axis} domain"}
        layout["annotations"].append(place | {"text": title})
        layout[f"xaxis{axis}"] = {"matches": "x"}  # the reader zooms all charts at once
        layout[f"yaxis{axis}"] = {"range": usual_range(values)}
    return {"data": data, "layout": layout}


def name_charts(runs: Sequence[RunSummary]) -> list[str]:
    """Returns the metrics to draw, without those that are always 0. A metric and its validation share a chart."""
    charts = []
    for run in runs:
        for metric, column in run.metrics.items():
            is_drawn = metric not in NOT_DRAWN and not metric.startswith("source_")
            if is_drawn and any(column.values()):
                charts.append(metric.removeprefix(VALIDATION))
    return list(dict.fromkeys(charts))


def _curve(run: RunSummary, number: int, metric: str) -> Iterator[dict[str, Any]]:
    """Yields the curve of a metric. Of a long one, means of buckets, after a band from the least to the greatest."""
    column = run.metrics.get(metric, {})
    if not column:
        return
    steps = np.array([*column], dtype=float)
    values = np.array([*column.values()], dtype=float)
    values[~np.isfinite(values)] = np.nan
    if len(steps) > 2 * BUCKETS:
        starts = np.linspace(0, len(steps), BUCKETS, endpoint=False, dtype=int)
        low = np.fmin.reduceat(values, starts)
        high = np.fmax.reduceat(values, starts)
        counts = np.add.reduceat(np.isfinite(values), starts, dtype=int)
        sums = np.add.reduceat(np.nan_to_num(values), starts)
        values = np.divide(sums, counts, out=np.full(BUCKETS, np.nan), where=counts > 0)
        steps = steps[[*(starts[1:] - 1), -1]]
        known = counts > 0
        around = np.concatenate([low[known], high[known][::-1]])
        there_and_back = np.concatenate([steps[known], steps[known][::-1]])
        yield _trace(run, number, there_and_back, around) | {"fill": "toself"}
    is_validation = metric.startswith(VALIDATION)
    line = {"dash": "dash"} if is_validation else {}
    name = f"{run.name} validation" if is_validation else run.name
    yield _trace(run, number, steps, values) | {"name": as_text(name), "line": line}


def as_text(text: str) -> str:
    """Returns the end of the text for plotly, which reads some tags of HTML."""
    return escape(text[-80:], quote=False)


def _restarts(run: RunSummary, number: int) -> dict[str, Any]:
    """Returns the lines at a run's restarts, from 0 to 1 on an axis of their own, and the run's line in the legend."""
    steps = [math.nan]
    heights = [math.nan]
    texts = [""]
    for event in run.restarts():
        steps += [event["step"], event["step"], math.nan]
        heights += [0, 1, math.nan]
        texts += [as_text(f"restart from {event.get('from')}")] * 3
    look = {"name": as_text(run.name), "text": texts, "yaxis": RESTARTS}
    return _trace(run, number, np.array(steps), np.array(heights)) | look


def _trace(run: RunSummary, number: int, steps: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    known = run.progress
    places = {
        "run": number,
        "steps": _plain(steps),
        "tokens": _plain(np.interp(steps, known.steps, known.tokens)),
        "hours": _plain(np.interp(steps, known.steps, known.hours)),
    }
    return {"meta": places, "y": _plain(values)}


def _plain(values: np.ndarray) -> list[float | None]:
    """Returns the values for JSON, in seven digits, more than a chart shows."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]


def usual_range(values: Sequence[float]) -> list[float] | None:
    """Returns the range of all but the most extreme 1 % at each end; None if that differs little from the whole."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return None
    low, high = np.quantile(known, [0.01, 0.99]).tolist()
    margin = 0.06 * (high - low)
    if max(known) - min(known) > 1.5 * (high - low) > 0:
        return [low - margin, high + margin]
    return None
