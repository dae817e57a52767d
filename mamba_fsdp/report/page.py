"""The HTML report: one page that contains all its data, and plotly.js, which draws it."""

import json
from collections.abc import Sequence
from pathlib import Path

from mamba_fsdp.report.curves import name_runs, summarise_run
from mamba_fsdp.storage.formats import timestamp

FOLDER = Path(__file__).parent
LOOKS = json.loads((FOLDER / "charts.json").read_text(encoding="utf-8"))


def for_different_tokenizers(charts: list[dict]) -> list[dict]:
    """Returns the charts with bits per byte first; those of losses and perplexities say that they do not compare."""
    named = []
    for chart in charts:
        if {"loss", "perplexity"} & chart["metrics"].keys():
            chart = chart | {"unit": "per token of each run's own tokenizer: not comparable"}
        named.append(chart)
    return sorted(named, key=lambda chart: "val_bits_per_byte" not in chart["metrics"])


def make_page(folders: Sequence[Path], tokenizers_differ: bool = False) -> str:
    """Returns the page of the runs in these folders. Raises UserError for a run without metrics."""
    from plotly.offline import get_plotlyjs

    runs = []
    colours = LOOKS["colours"]
    dashes = LOOKS["dashes"]  # each dash serves as many runs as there are colours
    for number, (name, folder) in enumerate(zip(name_runs(folders), folders)):
        look = {
            "name": name,
            "colour": colours[number % len(colours)],
            "dash": dashes[number // len(colours) % len(dashes)],
        }
        runs.append(look | summarise_run(folder))
    metrics = {metric for run in runs for metric in run["curves"]}
    charts = [chart for chart in LOOKS["charts"] if metrics & chart["metrics"].keys()]
    if tokenizers_differ:
        charts = for_different_tokenizers(charts)
    content = json.dumps({"made": timestamp(), "charts": charts, "runs": runs}, default=str)
    template = (FOLDER / "page.html").read_text(encoding="utf-8")
    before, between, after = template.split("__CUT__")
    no_tags = content.replace("<", "\\u003c")  # otherwise a text could end the <script>
    return before + get_plotlyjs() + between + no_tags + after
