"""python -m mamba_fsdp plot RUN [RUN ...] [--out=PICTURE.png]

Draw the training and validation loss of one or more runs over the step, from their metrics.jsonl.
The picture lands in RUN/loss.png unless --out names another place.
"""

from pathlib import Path

from mamba_fsdp.errors import UserError
from mamba_fsdp.report.plot import plot_losses
from mamba_fsdp.run_layout import LOSS_PICTURE


def main(*runs: str, out: str = "") -> None:
    if not runs:
        raise UserError("name at least one run folder; see --help")
    picture = Path(out) if out else Path(runs[0]) / LOSS_PICTURE
    plot_losses([Path(run) for run in runs], picture)
    print(picture)
