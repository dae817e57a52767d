"""Creates the HTML report: a single page that contains its data, and plotly.js to draw the curves."""

import json
from collections.abc import Sequence
from pathlib import Path

from mamba_fsdp.errors import UserError, python
from mamba_fsdp.reporting.charts import make_figure
from mamba_fsdp.reporting.run_summary import RunSummary, name_runs, summarise_run
from mamba_fsdp.storage.retry import read_text
from mamba_fsdp.text import utc_timestamp

PROGRAM_FACTS = {  # facts in the event of a start that are for programs and not shown to users
    "code",
    "device",
    "kernels",
    "ranks_per_node",
    "seconds_of_earlier_commands",
    "seconds_to_start",
    "torch",
    "validation",
}
TEMPLATE = Path(__file__).with_name("page.html")


def make_page(folders: Sequence[Path], tokenizers_differ: bool = False) -> str:
    """Returns the HTML page for the runs in these folders.

    tokenizers_differ: see make_figure. Raises UserError if a run does not have metrics, or if plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError(f"the report needs plotly: {python()} -m pip install plotly") from None
    runs = [summarise_run(folder, name) for name, folder in zip(name_runs(folders), folders)]
    records = [
        {
            "name": run.name,
            "settings": run.settings,
            "events": arrange_events(run.events),
            **run.other_records,
        }
        for run in runs
    ]
    content = {
        "made": utc_timestamp(),
        "runs": records,
        "differing": list_differing_settings(runs),
        "figure": make_figure(runs, tokenizers_differ),
    }
    before, between, after = read_text(TEMPLATE).split("__CUT__")
    # "</script>" in the data must not end the script.
    no_tags = json.dumps(content, default=str).replace("<", "\\u003c")
    return before + get_plotlyjs() + between + no_tags + after


def arrange_events(events: Sequence[dict]) -> list[dict]:
    """Returns the events for display: time, event, step and changed settings first, and without PROGRAM_FACTS."""
    shown = []
    for event in events:
        parts = {"time": event.get("time"), "event": event.get("event"), "step": event["step"]}
        if "changed" in event:
            parts["changed"] = event["changed"]
        parts |= {name: value for name, value in event.items() if name not in PROGRAM_FACTS}
        weights = event.get("weights")
        if isinstance(weights, dict):
            parts["weights"] = ", ".join(f"{name} {share}" for name, share in weights.items())
        shown.append(parts)
    return shown


def list_differing_settings(runs: Sequence[RunSummary]) -> list[str]:
    """Returns the names of the settings that differ between the runs."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [name for name in names if len({str(run.settings.get(name)) for run in runs}) > 1]
