"""Pictures of runs, drawn from their metrics.jsonl."""

from mamba_fsdp.errors import UserError
from mamba_fsdp.report.records import read
from mamba_fsdp.run_layout import METRICS


def plot_losses(runs, out):
    """Training loss as a thin line and validation loss as dots over the step, one colour per run, into the picture
    `out`.

    Raises UserError for a run without metrics or a place that can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    for colour, run in enumerate(runs):
        entries = read(run / METRICS)
        if not entries:
            raise UserError(f"{run}: holds no {METRICS} with entries; is it a run folder?")
        training = [(entry["step"], entry["loss"]) for entry in entries if entry.get("loss") is not None]
        validation = [(entry["step"], entry["val_loss"]) for entry in entries if entry.get("val_loss") is not None]
        if training:
            axes.plot(*zip(*training), color=f"C{colour}", linewidth=1.2, alpha=0.75, label=f"{run.name}: training")
        if validation:
            axes.plot(*zip(*validation), color=f"C{colour}", marker="o", linestyle="--", linewidth=1,
                      label=f"{run.name}: validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    try:
        figure.savefig(out)
    except (OSError, ValueError) as error:
        raise UserError(f"{out}: can't write the picture ({error})") from None
    finally:
        plt.close(figure)
