"""Sends the metrics to trackers: TensorBoard, with files in the run folder, and Weights & Biases."""

import os
import textwrap
import uuid
from pathlib import Path
from typing import Any

import yaml

from mamba_fsdp.errors import UserError, first_line, install_command
from mamba_fsdp.reporting.console import PrintLine
from mamba_fsdp.run.names import TENSORBOARD, WANDB_ID
from mamba_fsdp.run.records import Write, flatten_numbers
from mamba_fsdp.storage.retry import exists, read_text, write_for_user

SAMPLES_TAG = "validation/samples"


def make_trackers(
    run_folder: Path,
    settings: dict,
    step: int,
    print_line: PrintLine,
    write: Write = write_for_user,
) -> list[Any]:
    """Returns the trackers that the settings name.

    Each has the methods `write(entry)`, for an entry of metrics.jsonl, and `close()`.

    settings: {section: {name: value}}. step: the step that the run resumes from. print_line: prints a line for the
    user. write: replaces a file of the run. If the connection to W&B fails, a line is printed and the run continues
    without it. Raises UserError if W&B is not installed.
    """
    trackers: list[Any] = []
    kinds = settings["report"]["tracker"]
    if "tensorboard" in kinds:
        trackers.append(TensorBoard(run_folder, settings, step))
    if "wandb" in kinds:
        try:
            tracker = WeightsAndBiases(run_folder, settings, write)
        except ConnectionRefusedError as refusal:
            print_line(
                f"tracker    W&B is off: {refusal}; training continues without it. To log in, run `wandb login` or set "
                "WANDB_API_KEY; to record into the run folder, set WANDB_MODE=offline"
            )
        else:
            print_line(f"tracker    W&B: {tracker.place}")
            trackers.append(tracker)
    return trackers


def metric_tag(metric: str) -> str:
    """Returns the tag of a metric in a tracker: its group and its name, for example validation/val_loss."""
    group = "validation" if metric.startswith("val_") else "train"
    return f"{group}/{metric}"


class TensorBoard:
    """Writes TensorBoard's event files in the run folder.

    Entries after `step` are purged, because the run repeats these steps.
    """

    def __init__(self, run_folder: Path, settings: dict, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imported here, because few runs need it

        purge_step = step + 1 if step else 0
        self.writer = SummaryWriter(str(run_folder / TENSORBOARD), purge_step=purge_step)
        text = yaml.safe_dump(settings, sort_keys=False)
        # Indent the settings, so that Markdown shows them as a code block.
        self.writer.add_text("settings", textwrap.indent(text, "    "), step)

    def write(self, entry: dict) -> None:
        for name, value in flatten_numbers(entry).items():
            if value is not None:
                self.writer.add_scalar(metric_tag(name), value, entry["step"])
        samples = "\n\n".join(entry.get("samples", []))
        if samples:
            self.writer.add_text(SAMPLES_TAG, textwrap.indent(samples, "    "), entry["step"])

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Sends the metrics of a run to W&B.

    The run folder stores the id of the W&B run, so that a resumed run continues the same curves.

    W&B can't remove steps, and a run that was killed repeats some. Therefore steps that the server already has are not
    sent again.
    """

    def __init__(self, run_folder: Path, settings: dict, write: Write) -> None:
        """Raises ConnectionRefusedError if W&B can't start a run, and UserError if it is not installed."""
        try:
            import wandb
        except ImportError:
            raise UserError(
                f"tracker=wandb needs a package that is not installed: {install_command('wandb')}"
            ) from None
        id_file = run_folder / WANDB_ID
        if not exists(id_file):
            write(id_file, uuid.uuid4().hex)
        run_id = read_text(id_file).split()[0]  # older versions stored more than the id
        os.environ.setdefault("WANDB_SILENT", "true")  # otherwise W&B prints about forty lines
        try:
            mode = wandb.setup().settings.mode
            online = mode == "online"
            if online and not wandb.api.api_key:  # otherwise W&B asks for a key at the terminal
                raise ConnectionRefusedError("nobody is logged in")
            self.run = wandb.init(
                project=settings["report"]["wandb_project"]
                or os.environ.get("WANDB_PROJECT")
                or "mamba-fsdp",
                id=run_id,
                name=settings["report"]["wandb_name"]
                or os.environ.get("WANDB_NAME")
                or run_folder.name,
                resume="allow" if online else None,
                dir=str(run_folder),
                config=settings,
            )
        except Exception as error:  # the errors of W&B do not have a common class in all versions
            raise ConnectionRefusedError(first_line(error)) from None
        self.place = self.run.url if online else f"{mode}, in {run_folder}/wandb"
        self.next_step = self.run.step if self.run.resumed else 0

    def write(self, entry: dict) -> None:
        if entry["step"] >= self.next_step:
            values = {metric_tag(name): value for name, value in flatten_numbers(entry).items()}
            if "samples" in entry:
                from wandb import Table

                values[SAMPLES_TAG] = Table(["text"], [[text] for text in entry["samples"]])
            self.run.log(values, step=entry["step"])

    def close(self) -> None:
        self.run.finish()
