"""Defines the layout of a run folder: which folder is one, and which of its checkpoints count. names.py has the names
in it. Without torch."""

from pathlib import Path

from mamba_fsdp.errors import UserError
from mamba_fsdp.run.names import (
    CHECKPOINTS,
    LEASE,
    NODES,
    PROFILE,
    SETTINGS,
    STARTS,
    STATUS,
    STOP,
    committed_names,
    step_of,
)
from mamba_fsdp.storage.patience import exists, list_hidden_beside, names_in

IN_USE = "stop that run first, or give this one another save_ckpt_path"
# In a checkpoint, for each parameter: the weight and AdamW's two moments, all fp32. Muon's has fewer.
CHECKPOINT_BYTES = 12
# While the model is written, see write_pth: the weight, fp32, in two files.
PUBLISHING_BYTES = 8
# What may lie in the folder before a run has begun there.
BEFORE_A_RUN = {SETTINGS, STOP, STARTS, PROFILE, NODES}
LOGS = (
    ".log",
    ".out",
    ".err",
)  # a job may begin them before the run; users like to have them there


def step_name(step: int) -> str:
    """Returns the name of a checkpoint's folder, and of the folder of its model."""
    return f"step_{step:08d}"


def rank_file(rank: int) -> str:
    """Returns the name of the file that one rank writes of a checkpoint."""
    return f"rank_{rank:05d}.safetensors"


def check_is_run_folder(folder: str | Path) -> None:
    """Raises UserError if the folder that is to be a run folder holds something else, a token store for example."""
    try:
        names = set(names_in(folder))
    except OSError:  # writing to the folder will report it
        return
    foreign = sorted(
        name
        for name in names - BEFORE_A_RUN
        if not name.startswith(".") and not name.endswith(LOGS)
    )
    if not foreign or {CHECKPOINTS, STATUS, LEASE} & names:
        return
    raise UserError(
        f"save_ckpt_path {folder} is not a run folder (it holds {', '.join(foreign[:4])}); name a new folder or "
        "an empty one"
    )


def committed(checkpoints: str | Path) -> list[Path]:
    """Returns the committed checkpoints in the folder `checkpoints`, oldest first, whole or not."""
    folder = Path(checkpoints)
    return [folder / name for name in committed_names(str(folder), names_in, exists)]


def newest_step(run: str | Path) -> int:
    """Returns the step of a run's newest committed checkpoint, whole or not; 0 if there is none."""
    checkpoints = committed(Path(run, CHECKPOINTS))
    if not checkpoints:
        return 0
    return step_of(checkpoints[-1].name) or 0


def unfinished(run: Path) -> list[Path]:
    """Returns the checkpoints that are being saved, or that a killed run was saving; see lease.py."""
    own = list_hidden_beside(run / LEASE)
    return sorted(folder / name for folder in own for name in names_in(folder) if step_of(name))


def removed(checkpoint: Path) -> UserError:
    """Returns the error for a checkpoint that its run removed while it was read."""
    return UserError(
        f"{checkpoint} is gone: its run has newer checkpoints and removed this one while it was read; run the command "
        "again on the run folder, which takes the newest"
    )
