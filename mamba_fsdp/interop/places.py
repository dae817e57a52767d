"""Finds the starting point of a run, and checks whether a path is a model, by looking at which files exist. This module does
not import torch, so that errors are reported immediately."""

from dataclasses import dataclass
from pathlib import Path

from mamba_fsdp.errors import UserError, python
from mamba_fsdp.importing.kinds import (
    DCP_INDEX,
    classify_path,
    unexpected_model_error,
    unexpected_path_error,
)
from mamba_fsdp.run.layout import list_committed
from mamba_fsdp.run.names import CHECKPOINTS, COMMIT
from mamba_fsdp.settings.train_config import CheckpointConfig
from mamba_fsdp.storage.retry import exists, is_file, stat_of

DCP_CONVERSION = "{1} -m torch.distributed.checkpoint.format_utils dcp_to_torch {0} {0}.pth"


@dataclass(frozen=True)
class Origin:
    """The checkpoint or weights that a run starts from."""

    setting: str = ""  # the setting that contains the path; "" for random weights
    path: str = ""
    is_checkpoint: bool = False  # True: weights and optimizer state; False: only weights

    @property
    def is_own(self) -> bool:
        """Returns whether the run resumes from its own checkpoint."""
        return self.setting == "save_ckpt_path"


def find_origin(config: CheckpointConfig) -> Origin:
    """Finds the starting point of a run: its own checkpoint, otherwise init_from or load_ckpt_path, otherwise random weights.
    Raises UserError if the path in one of these settings is not a model or a checkpoint."""
    if list_committed(Path(config.save_ckpt_path, CHECKPOINTS)):
        return Origin("save_ckpt_path", config.save_ckpt_path, is_checkpoint=True)
    if config.init_from:
        check_model_path(config.init_from)
        return Origin("init_from", config.init_from)
    if not config.load_ckpt_path or config.loads_own_folder():
        return Origin()
    path = Path(config.load_ckpt_path)
    if not (
        is_file(path)
        or exists(path / COMMIT)
        or list_committed(path / CHECKPOINTS)
        or list_committed(path)
    ):
        raise unexpected_path_error(path, "a run with a checkpoint", _weights_of(path))
    return Origin("load_ckpt_path", str(path), is_checkpoint=not config.loads_weights_file())


def check_model_path(source: str | Path) -> None:
    """Raises UserError if the path `source` is not a model."""
    path = Path(source)
    place = classify_path(path)
    if place.kind in ("model", "model_file", "checkpoint") or place.kind == "run" and place.names:
        return
    if exists(path):
        refuse_dcp(path)
    raise unexpected_model_error(path)


def _weights_of(path: Path) -> str:
    """Returns a hint about the setting that loads weights from a path without a checkpoint, or "" if there are no weights."""
    kind = classify_path(path).kind
    return f"init_from={path} takes its weights" if kind in ("model", "model_file", "dcp") else ""


def refuse_dcp(folder: Path) -> None:
    """Raises UserError if `folder` is a checkpoint of torch.distributed.checkpoint or contains one.
    Such checkpoints are not read, because their index is a pickle that can execute arbitrary
    code."""
    indexes = [*folder.glob(DCP_INDEX), *folder.glob(f"*/{DCP_INDEX}")]
    if indexes:
        newest = max(indexes, key=lambda file: stat_of(file).st_mtime).parent
        raise UserError(
            f"{newest} is a folder of torch.distributed.checkpoint, which only its own program reads. "
            f"If you trust it, convert it with torch 2.3 or newer: {DCP_CONVERSION.format(newest, python())}"
        )
