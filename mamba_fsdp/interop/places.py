"""Whether a path can name a model, as far as files tell by being there. Without torch: a mistake is told at once."""

from pathlib import Path

from mamba_fsdp.errors import UserError
from mamba_fsdp.run_layout import CHECKPOINTS, COMMIT, MODEL_CONFIG, committed, no_checkpoint

DCP_INDEX = ".metadata"  # of torch.distributed.checkpoint
DCP_CONVERSION = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {0} {0}.pth"


def check_place(source: str | Path) -> None:
    """Raises UserError where `source` names no model."""
    path = Path(source)
    if not path.exists():
        raise UserError(
            f"{source}: there is no such file or folder; a model of the Hugging Face hub has to be downloaded "
            "first: hf download NAME --local-dir FOLDER"
        )
    if path.is_file() or (path / COMMIT).is_file():
        return
    if (path / CHECKPOINTS).is_dir():
        if not committed(path / CHECKPOINTS):
            raise no_checkpoint(path)
    elif not (path / MODEL_CONFIG).is_file():
        refuse_dcp(path)
        raise UserError(
            f"{path} holds no model: it is neither a run folder ({CHECKPOINTS}/) nor a checkpoint "
            f"({COMMIT}), and has no {MODEL_CONFIG}"
        )


def refuse_dcp(folder):
    """Raises UserError for a folder of torch.distributed.checkpoint, or of such folders: their index is a pickle of
    classes, which can't be read without running what it names."""
    found = [*folder.glob(DCP_INDEX), *folder.glob(f"*/{DCP_INDEX}")]
    if found:
        newest = max(found, key=lambda file: file.stat().st_mtime).parent
        raise UserError(
            f"{newest} is a folder of torch.distributed.checkpoint, which only its own program reads. "
            f"If you trust it, convert it with torch 2.3 or newer: {DCP_CONVERSION.format(newest)}"
        )
