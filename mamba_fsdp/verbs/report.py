"""python -m mamba_fsdp report RUN [RUN ...] [--out=FILE.html] [--png=FOLDER]

Show one or more runs, of which some may still be training, in one HTML file that needs no network: curves by steps,
tokens or hours, settings and where they differ, the data's mixture, restarts, checkpoints, samples (docs/watching.md).

  --out  the file, or a folder for it; without it RUN/report.html, RUN the first
  --png  also draw each chart by steps into this folder, for a paper: as NAME.png and as NAME.pdf
"""

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mamba_fsdp.errors import UserError
from mamba_fsdp.report.curves import look_at, names_of
from mamba_fsdp.run_layout import REPORT
from mamba_fsdp.storage import write_for_user

FILES = Path(__file__).parents[1] / "report"
LOOKS = json.loads((FILES / "charts.json").read_text(encoding="utf-8"))
COLOURS, DASHES = (
    LOOKS["colours"],
    LOOKS["dashes"],
)  # dashes: of the next so many runs; in a chart, of its metrics


def main(*runs: str, out: str = "", png: str = "") -> None:
    """Raises UserError for a run without metrics or a place that can't be written."""
    folders = list({Path(run).resolve(): Path(run) for run in runs}.values())
    if not folders:
        raise UserError("name at least one run folder; see --help")
    seen = [
        {
            "name": name,
            "colour": COLOURS[number % len(COLOURS)],
            "dash": DASHES[number // len(COLOURS) % len(DASHES)],
            **look_at(folder),
        }
        for number, (name, folder) in enumerate(zip(names_of(folders), folders))
    ]
    charts, file = charts_of(seen), Path(out) if out else folders[0] / REPORT
    file = file / REPORT if file.is_dir() or out.endswith("/") else file
    try:
        for folder in (file.parent, *([Path(png)] if png else [])):
            folder.mkdir(parents=True, exist_ok=True)
        write_for_user(file, page(seen, charts))
        if png:
            draw(seen, charts, Path(png))
    except OSError as error:
        raise UserError(f"{error.filename or png}: can't be written ({error.strerror})") from None
    print(file, *[f"{png}/*.png, *.pdf"] * bool(png), sep="\n")


def charts_of(runs: Sequence[dict]) -> list[dict[str, Any]]:
    """What is drawn: of the metrics that the runs have those of charts.json, then each that it does not know."""
    left = {metric: metric for run in runs for metric in run["curves"]}
    found = [
        {
            **chart,
            "metrics": {
                metric: label
                for metric, label in chart["metrics"].items()
                if left.pop(metric, None)
            },
        }
        for chart in LOOKS["charts"]
    ]
    sources = {
        metric: metric.partition("/")[2] for metric in left if metric.startswith("source_epochs/")
    }
    found += [{"title": "Epochs of each source", "unit": "", "metrics": sources}]
    found += [
        {"title": metric.replace("_", " ").capitalize(), "unit": "", "metrics": {metric: ""}}
        for metric in left
        if not metric.startswith("source_") and any(run["last"].get(metric) for run in runs)
    ]
    return [chart for chart in found if chart["metrics"]]


def page(runs: Sequence[dict], charts: Sequence[dict]) -> str:
    """The HTML file, with all that it shows and plotly.js in it."""
    from plotly.offline import get_plotlyjs

    made = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    before, between, after = (FILES / "page.html").read_text(encoding="utf-8").split("__CUT__")
    content = json.dumps({"made": made, "charts": charts, "runs": runs}, default=str)
    return (
        before + get_plotlyjs() + between + content.replace("<", "\\u003c") + after
    )  # no text ends the <script>


def draw(runs: Sequence[dict], charts: Sequence[dict], folder: Path) -> None:
    """Writes a picture of each chart as PNG and PDF. Raises OSError."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for chart in charts:
        figure, axes = plt.subplots(
            figsize=(5.5, max(3.2, 0.3 + 0.17 * len(runs))), layout="constrained"
        )
        draw_curves(axes, runs, chart)
        axes.set(
            xlabel="step",
            ylabel=f"{chart['title']}\n({chart['unit']})" if chart["unit"] else chart["title"],
        )
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside right upper", frameon=False, fontsize=7)
        name = re.sub(r"[^a-z]+", "_", chart["title"].lower()).strip("_")
        for ending in ("png", "pdf"):
            figure.savefig(unfinished := folder / f".{name}.{ending}", dpi=300)
            unfinished.replace(folder / f"{name}.{ending}")
        plt.close(figure)


def draw_curves(axes: Any, runs: Sequence[dict], chart: dict[str, Any]) -> None:
    """The runs' curves of a chart on matplotlib's axes; what few points reach may lie outside of them."""
    drawn: list[float] = []
    for run in runs:
        axes.plot(
            [],
            [],
            linestyle=run["dash"],
            color=run["colour"],
            label=run["name"] if len(runs) > 1 else None,
        )
        for dash, metric in zip((run["dash"], *DASHES[1:], *DASHES * 9), chart["metrics"]):
            if found := run["curves"].get(metric):
                mean, low, high = (
                    np.array(found[name], dtype=float) for name in ("mean", "low", "high")
                )
                axes.plot(
                    found["steps"],
                    mean,
                    linestyle=dash,
                    color=run["colour"],
                    linewidth=1.1,
                    marker="." if len(mean) < 60 else "",
                    markersize=4,
                )
                axes.fill_between(
                    found["steps"][: len(low)],
                    low,
                    high,
                    color=run["colour"],
                    linewidth=0,
                    alpha=min(0.18, 0.5 / len(runs)),
                )
                drawn += mean[np.isfinite(mean)].tolist()
    for dash, label in zip(DASHES * 9, chart["metrics"].values()):
        axes.plot([], [], linestyle=dash, color="black", label=label or None)
    if len(set(drawn)) > 1:
        ends, most = np.quantile(drawn, (0, 1)), np.quantile(drawn, (0.01, 0.99))
        low, high = most if np.ptp(ends) > 1.5 * np.ptp(most) > 0 else ends
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
