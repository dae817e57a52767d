"""Finds what a run starts from, and whether a path can name a model, from which files exist. Without torch, so that a
mistake is reported at once."""

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
    """What a run starts from."""

    setting: str = ""  # that names it; empty for random weights
    path: str = ""
    is_checkpoint: bool = False  # with the optimiser's state; if False, only weights

    @property
    def is_own(self) -> bool:
        """Returns whether the run resumes from a checkpoint of its own."""
        return self.setting == "save_ckpt_path"


def find_origin(config: CheckpointConfig) -> Origin:
    """Returns what a run starts from: its own checkpoints, else what load_ckpt_path or init_from names, else random
    weights. Raises UserError if what they name is not there."""
    if list_committed(Path(config.save_ckpt_path, CHECKPOINTS)):
        return Origin("save_ckpt_path", config.save_ckpt_path, is_checkpoint=True)
    if config.init_from:
        check_place(config.init_from)
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


def check_place(source: str | Path) -> None:
    """Raises UserError if `source` does not name a model."""
    path = Path(source)
    place = classify_path(path)
    if place.kind in ("model", "model_file", "checkpoint") or place.kind == "run" and place.names:
        return
    if exists(path):
        refuse_dcp(path)
    raise unexpected_model_error(path)


def _weights_of(path: Path) -> str:
    """Returns what takes the weights at a path that holds no checkpoint; "" if there are none."""
    kind = classify_path(path).kind
    return f"init_from={path} takes its weights" if kind in ("model", "model_file", "dcp") else ""


def refuse_dcp(folder: Path) -> None:
    """Raises UserError for a folder of torch.distributed.checkpoint, or of such folders: their index is a pickle of
    classes, and reading it could run any code."""
    indexes = [*folder.glob(DCP_INDEX), *folder.glob(f"*/{DCP_INDEX}")]
    if indexes:
        newest = max(indexes, key=lambda file: stat_of(file).st_mtime).parent
        raise UserError(
            f"{newest} is a folder of torch.distributed.checkpoint, which only its own program reads. "
            f"If you trust it, convert it with torch 2.3 or newer: {DCP_CONVERSION.format(newest, python())}"
        )
