"""Where metrics go besides metrics.jsonl: TensorBoard's event files in the run folder, or Weights & Biases (W&B)."""

import os
import uuid
from collections.abc import Collection
from pathlib import Path

from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.run_layout import TENSORBOARD, WANDB_ID
from mamba_fsdp.storage import write_atomically


def numbers_of(entry: dict) -> dict[str, float]:
    """The numbers of an entry of the metrics but for its step, those of each source as in `source_epochs/code`."""
    flat: dict[str, float] = {}
    for name, value in entry.items():
        flat |= {f"{name}/{part}": one for part, one in value.items()} if isinstance(value, dict) else {name: value}
    del flat["step"]
    return flat


def make_trackers(kinds: Collection[str], run_folder: Path, settings: dict, step: int, project: str = "",
                  name: str = "") -> "list[TensorBoard | WeightsAndBiases]":
    """For a run that resumes from `step`; project, name: in W&B. Raises UserError where one is missing or refuses."""
    trackers: list[TensorBoard | WeightsAndBiases] = [TensorBoard(run_folder, step)] if "tensorboard" in kinds else []
    if "wandb" in kinds:
        trackers.append(WeightsAndBiases(run_folder, settings, project, name))
    return trackers


class TensorBoard:
    def __init__(self, run_folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("tracker=tensorboard needs its package: .venv/bin/pip install tensorboard") from None
        # What an interrupted run wrote after `step` is dropped, as in metrics.jsonl: these steps come again.
        self.writer = SummaryWriter(str(run_folder / TENSORBOARD), purge_step=step + 1 if step else 0)
        self.close = self.writer.close

    def write(self, entry: dict) -> None:
        for name, value in numbers_of(entry).items():
            if value is not None:
                self.writer.add_scalar(name, value, entry["step"])


class WeightsAndBiases:
    """One W&B run per run folder, which keeps its id, so that a resumed run continues the same curves."""

    def __init__(self, run_folder: Path, settings: dict, project: str, name: str) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError("tracker=wandb needs its package: .venv/bin/pip install wandb") from None
        kept = run_folder / WANDB_ID
        if not kept.exists():
            write_atomically(kept, uuid.uuid4().hex)
        try:
            self.run = wandb.init(project=project or os.environ.get("WANDB_PROJECT") or "mamba-fsdp",
                                  name=name or os.environ.get("WANDB_NAME") or run_folder.name, dir=str(run_folder),
                                  id=kept.read_text().strip(), resume="allow", config=settings)
        except Exception as error:  # its errors have no common class in all its versions
            raise UserError(f"tracker=wandb: W&B refused ({first_line(error)}); log in with `wandb login` or "
                            "WANDB_API_KEY, or set WANDB_MODE=offline") from None
        self.close = self.run.finish

    def write(self, entry: dict) -> None:
        self.run.log(numbers_of(entry), step=entry["step"])
