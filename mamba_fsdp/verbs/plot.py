"""python -m mamba_fsdp plot RUN [RUN ...] [--out=PICTURE.png]

Draw the training and validation loss of one or more runs over the step, from their metrics.jsonl.
The picture lands in RUN/loss.png unless --out names another place.
"""

from pathlib import Path

from mamba_fsdp.errors import UserError
from mamba_fsdp.report.records import read
from mamba_fsdp.run_layout import LOSS_PICTURE, METRICS


def main(*runs: str, out: str = "") -> None:
    """Raises UserError for a run without metrics or a place that can't be written."""
    if not runs:
        raise UserError("name at least one run folder; see --help")
    picture = Path(out) if out else Path(runs[0]) / LOSS_PICTURE

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    for number, run in enumerate(map(Path, runs)):
        entries = read(run / METRICS)
        if not entries:
            raise UserError(f"{run}: holds no {METRICS} with entries; is it a run folder?")
        for name, key, style in (("training", "loss", {"linewidth": 1.2, "alpha": 0.75}),
                                 ("validation", "val_loss", {"linewidth": 1, "linestyle": "--", "marker": "o"})):
            points = [(entry["step"], entry[key]) for entry in entries if entry.get(key) is not None]
            if points:
                axes.plot(*zip(*points), color=f"C{number}", label=f"{run.name}: {name}", **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    try:
        figure.savefig(picture)
    except (OSError, ValueError) as error:
        raise UserError(f"{picture}: can't write the picture ({error})") from None
    finally:
        plt.close(figure)
    print(picture)
