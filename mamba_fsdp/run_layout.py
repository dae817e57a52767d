"""The layout of a run folder: what everything in it is called, and which checkpoints count. Without torch.

    config.yaml  metrics.jsonl  events.jsonl  status.json  lease.json  kernels.json  STOP  tokenizer/
    failures/  preflight/
    checkpoints/step_00001000/   rank_00000.safetensors ...  state.json  COMMIT  KEEP
    pth/step_00001000/           consolidated.00.pth  config.json  tokenizer/
    profile/  tensorboard/  wandb/  wandb_id  report.html

1.train.sbatch knows some of these names too; a test holds it to this file.
"""

import os
import re
from pathlib import Path

from mamba_fsdp.errors import UserError
from mamba_fsdp.storage import exists, retry_io

SETTINGS, METRICS, STATUS, LEASE = "config.yaml", "metrics.jsonl", "status.json", "lease.json"
EVENTS = "events.jsonl"  # starts, ends, checkpoints, faults, over all restarts
KERNELS = (
    "kernels.json"  # the backends that the run was begun with on a GPU, see train/first_use.py
)
CACHES = ".cache"  # beside the run folders
STOP = "STOP"  # whoever makes this file asks the run to stop
TOKENIZER = "tokenizer"  # of the data, beside the model that was trained on it
FAILURES, PREFLIGHT = "failures", "preflight"  # what the launcher leaves
CHECKPOINTS, STATE, COMMIT = "checkpoints", "state.json", "COMMIT"
KEPT, READING = (
    "KEEP",
    ".reading.",
)  # in a checkpoint: it stays for ever; the beginning of what its readers hold
MODELS, CONSOLIDATED, MODEL_CONFIG = "pth", "consolidated.00.pth", "config.json"
PROFILE, TENSORBOARD, WANDB_ID, REPORT = "profile", "tensorboard", "wandb_id", "report.html"
CHECKPOINT_BYTES = (
    12  # of a checkpoint for each parameter: the weight and AdamW's two moments, all fp32
)
BEFORE_A_RUN = {
    SETTINGS,
    STOP,
    FAILURES,
    PREFLIGHT,
    PROFILE,
}  # may be there when nothing has begun yet
LOGS = (".log", ".out", ".err")  # which users like to have there, begin with the job


def step_name(step: int) -> str:
    """The name of a checkpoint's folder, and of its model's."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a folder of this name holds; None for a name that step_name does not give."""
    match = re.fullmatch(r"step_(\d+)", name)
    return int(match[1]) if match else None


def rank_file(rank: int) -> str:
    """The name of what one rank wrote of a checkpoint."""
    return f"rank_{rank:05d}.safetensors"


def check_is_run_folder(folder: str | Path) -> None:
    """Raises UserError where the folder that is to be a run's holds other things and no run: a token store, say."""
    try:
        names = set(os.listdir(folder))
    except OSError:  # there is none yet, or what is wrong is told when it is written to
        return
    foreign = sorted(
        name
        for name in names - BEFORE_A_RUN
        if not name.startswith(".") and not name.endswith(LOGS)
    )
    if not foreign or {CHECKPOINTS, STATUS, LEASE} & names:
        return
    is_store = any(
        exists(Path(folder, part, "index.json")) for part in (".", "train", "validation")
    )
    shown = ", ".join(foreign[:4] + ["..."] * (len(foreign) > 4))
    raise UserError(
        f"save_ckpt_path {folder} holds {'a token store' if is_store else 'other things'} and no run "
        f"({shown}); name a new folder or an empty one"
    )


def committed(checkpoints: str | Path) -> list[Path]:
    """The committed checkpoints in the folder `checkpoints`, oldest first, whole or not."""
    folder = Path(checkpoints)
    try:
        names = retry_io(
            lambda: os.listdir(folder), folder
        )  # glob takes a failure for an empty folder
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(step, folder / name) for name in names if (step := step_of(name)) is not None]
    return [path for _, path in sorted(found) if exists(path / COMMIT)]


def no_checkpoint(path: str | Path) -> UserError:
    """That there is none to be found by this path."""
    hint = f"; init_from={path} takes its weights" if Path(path, ".metadata").is_file() else ""
    return UserError(
        f"{path}: there is no such file or folder"
        if not exists(path)
        else f"{path} is neither a "
        f"committed checkpoint nor a run folder with one ({CHECKPOINTS}/step_*/{COMMIT}){hint}"
    )


def is_own(origin: str, run: str | Path) -> bool:
    """Whether `origin`, a load_ckpt_path, is the run folder itself: it means to resume or, if empty, to start."""
    return bool(origin) and os.path.realpath(origin) == os.path.realpath(run)


def check_exists(origin: str, run: str | Path) -> None:
    """Raises UserError where a run without a checkpoint is to start from `origin`, a load_ckpt_path with nothing in it."""
    path = Path(origin)
    if not origin or is_own(origin, run) or committed(Path(run, CHECKPOINTS)):
        return
    if not exists(path):
        raise UserError(
            f"load_ckpt_path {origin}: there is no such file or folder; only save_ckpt_path itself, {run}, "
            "may be named before there is something in it"
        )
    if path.is_dir() and not (
        exists(path / COMMIT) or committed(path / CHECKPOINTS) or committed(path)
    ):
        raise no_checkpoint(path)
