"""Defines the layout of a run folder: how to recognize one, and which of its checkpoints are committed.

names.py defines the file names. This module does not import torch.
"""

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
from mamba_fsdp.storage.retry import exists, list_names, list_temporary_paths

BUSY_RUN_REMEDY = "stop that run first, or give this one another save_ckpt_path"
# A checkpoint stores the weight and AdamW's two moments in fp32. With Muon it stores fewer moments.
CHECKPOINT_BYTES_PER_PARAMETER = 12
# Publishing the model writes each weight in fp32 to two files, see write_pth.
PUBLISHING_BYTES_PER_PARAMETER = 8
# The user or the launcher can create these files before the run starts.
NAMES_BEFORE_RUN = {SETTINGS, STOP, STARTS, PROFILE, NODES}
# Users keep the log files of a job in the run folder, and the job creates them before the run starts.
LOG_SUFFIXES = (".log", ".out", ".err")


def step_name(step: int) -> str:
    """Returns the folder name of the checkpoint of `step`.

    The model published from it has a folder of the same name.
    """
    return f"step_{step:08d}"


def rank_file(rank: int) -> str:
    """Returns the name of the checkpoint file that `rank` writes."""
    return f"rank_{rank:05d}.safetensors"


def check_is_run_folder(folder: str | Path) -> None:
    """Raises UserError if the folder contains something other than a run, for example a token store.

    An empty or missing folder is accepted, because a run can start there.
    """
    try:
        names = set(list_names(folder))
    except OSError:  # the first write to the folder reports the error
        return
    foreign = sorted(
        name
        for name in names - NAMES_BEFORE_RUN
        if not name.startswith(".") and not name.endswith(LOG_SUFFIXES)
    )
    if not foreign or {CHECKPOINTS, STATUS, LEASE} & names:
        return
    raise UserError(
        f"save_ckpt_path {folder} is not a run folder (it contains {', '.join(foreign[:4])}); name a new folder or "
        "an empty one"
    )


def list_committed(checkpoints: str | Path) -> list[Path]:
    """Returns the committed checkpoints in the folder `checkpoints`, oldest first. Their files are not verified."""
    folder = Path(checkpoints)
    return [folder / name for name in committed_names(str(folder), list_names, exists)]


def checkpoints_by_step(run: str | Path) -> dict[int, Path]:
    """Returns {step: committed checkpoint} of a run, oldest first. Does not verify the files."""
    checkpoints = list_committed(Path(run, CHECKPOINTS))
    return {step_of(checkpoint.name) or 0: checkpoint for checkpoint in checkpoints}


def newest_step(run: str | Path) -> int:
    """Returns the step of a run's newest committed checkpoint; 0 if there is none. Does not verify its files."""
    return max(checkpoints_by_step(run), default=0)


def list_unfinished(run: Path) -> list[Path]:
    """Returns the folders of checkpoints that are being saved now, or that a killed run left unfinished.

    These folders are in the staging folders of the run's lease, see lease.py.
    """
    own = list_temporary_paths(run / LEASE)
    return sorted(folder / name for folder in own for name in list_names(folder) if step_of(name))


def checkpoint_removed_error(checkpoint: Path) -> UserError:
    """Returns the error for a checkpoint that its run removed while this process was reading it."""
    return UserError(
        f"{checkpoint} is gone: its run has newer checkpoints and removed this one while it was read; run the command "
        "again with the run folder, to use the newest one"
    )
