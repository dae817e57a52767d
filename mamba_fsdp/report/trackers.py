"""Where metrics go besides metrics.jsonl: TensorBoard's event files in the run folder, or Weights & Biases."""

import uuid

from mamba_fsdp.durable import write_atomically
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.run_layout import TENSORBOARD, WANDB_ID


def make_tracker(kind, run_folder, settings, step):
    """An object with write(entry) and close(), for a run that goes on from `step`. Raises UserError where the package
    is missing or refuses."""
    return {"none": NoTracker, "tensorboard": TensorBoard, "wandb": WeightsAndBiases}[kind](run_folder, settings, step)


class NoTracker:
    def __init__(self, run_folder, settings, step):
        pass

    def write(self, entry):
        pass

    def close(self):
        pass


class TensorBoard:
    def __init__(self, run_folder, settings, step):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("tracker=tensorboard needs the package tensorboard: "
                            ".venv/bin/pip install tensorboard") from None
        # What an interrupted run wrote after `step` comes again, and is dropped as in metrics.jsonl.
        self.writer = SummaryWriter(str(run_folder / TENSORBOARD), purge_step=step + 1 if step else 0)

    def write(self, entry):
        for name, value in entry.items():
            if name != "step" and value is not None:
                self.writer.add_scalar(name, value, entry["step"])

    def close(self):
        self.writer.close()


class WeightsAndBiases:
    """One W&B run per run folder, which keeps its id, so that a run that goes on draws on in the same curves."""

    def __init__(self, run_folder, settings, step):
        try:
            import wandb
        except ImportError:
            raise UserError("tracker=wandb needs the package wandb: .venv/bin/pip install wandb") from None
        kept = run_folder / WANDB_ID
        if not kept.exists():
            write_atomically(kept, uuid.uuid4().hex)
        try:
            self.run = wandb.init(project="mamba-fsdp", id=kept.read_text().strip(), name=run_folder.name,
                                  dir=str(run_folder), resume="allow", config=settings)
        except Exception as error:  # its errors have no common class in all its versions
            raise UserError(f"tracker=wandb: W&B refused ({first_line(error)}); log in with `wandb login` or "
                            "WANDB_API_KEY, or set WANDB_MODE=offline") from None

    def write(self, entry):
        self.run.log({name: value for name, value in entry.items() if name != "step"}, step=entry["step"])

    def close(self):
        self.run.finish()
