"""Makes the HTML report: one page that has all its data and plotly.js, which draws its curves."""

import json
from collections.abc import Sequence
from pathlib import Path

from mamba_fsdp.errors import UserError
from mamba_fsdp.report.charts import make_figure
from mamba_fsdp.report.run_summary import name_runs, summarise_run
from mamba_fsdp.report.tables import make_tables
from mamba_fsdp.storage.formats import timestamp

PAGE = Path(__file__).with_name("page.html")


def make_page(folders: Sequence[Path], tokenizers_differ: bool = False) -> str:
    """Returns the page of the runs in these folders. Raises UserError for a run without metrics."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("the report needs plotly: python -m pip install plotly") from None
    runs = [summarise_run(folder, name) for name, folder in zip(name_runs(folders), folders)]
    content = {
        "made": timestamp(),
        "runs": [run.name for run in runs],
        "figure": make_figure(runs, tokenizers_differ),
        "tables": make_tables(runs),
    }
    before, between, after = PAGE.read_text(encoding="utf-8").split("__CUT__")
    no_tags = json.dumps(content, default=str).replace(
        "<", "\\u003c"
    )  # a text must not end <script>
    return before + get_plotlyjs() + between + no_tags + after
