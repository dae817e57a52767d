"""Names what lies in a run folder, and tells which checkpoints there count. For the cluster's own Python too, which may
be 3.6.

    config.yaml  config.1.yaml ...  metrics.jsonl  steps.jsonl  events.jsonl  status.json  lease.json
    kernels.json  nodes.jsonl  STOP  tokenizer/
    starts/JOB.RESTART/          settings.json  STOP  preflight/  NODE.json  outcome.json
    checkpoints/step_00001000/   rank_00000.safetensors ...  state.json  COMMIT  KEEP
    pth/step_00001000/           consolidated.00.pth  config.json  tokenizer/
    profile/  tensorboard/  wandb/  wandb_id  report.html  lm_eval_TIME.json
    evaluations/NAME.jsonl
"""

import os
import re
from typing import Callable, List, Optional

SETTINGS = "config.yaml"
SETTINGS_COPY = "config.{}.yaml"  # of a start, by a number; events.jsonl says from which step on
METRICS = "metrics.jsonl"
STEPS = "steps.jsonl"  # loss and gradient norm of every step, with all their digits
EVENTS = "events.jsonl"  # starts, ends, checkpoints, faults, over all restarts
NODES = "nodes.jsonl"  # the nodes that were lost or sick, see run/node_record.py
# The backends that the run was begun with on a GPU, see trainer/first_use.py.
KERNELS = "kernels.json"
CACHES = ".cache"  # next to the run folders
STATUS = "status.json"
LEASE = "lease.json"
STOP = "STOP"  # whoever makes this file asks the run to stop
TOKENIZER = "tokenizer"  # of the data, next to the model that was trained on it
# Files of one start, in a folder with its name: the settings for its ranks, the nodes' reports, and how it ended.
STARTS = "starts"
RESOLVED = "settings.json"
PREFLIGHT = "preflight"
VERDICT = "verdict.json"  # in PREFLIGHT
OUTCOME = "outcome.json"
# In the environment of ranks: the folder of their start, and what stop_mark said when the start began.
START = "MAMBA_FSDP_START"
OLD_STOP = "MAMBA_FSDP_OLD_STOP"
# Also there: how many nodes the job wanted, if it trains on fewer. The global batch stays that of this number.
WANTED_NODES = "MAMBA_FSDP_WANTED_NODES"
CHECKPOINTS = "checkpoints"
STATE = "state.json"
COMMIT = "COMMIT"
KEPT = "KEEP"  # in a checkpoint: it is never removed
MODELS = "pth"
CONSOLIDATED = "consolidated.00.pth"
MODEL_CONFIG = "config.json"
PROFILE = "profile"
TENSORBOARD = "tensorboard"
WANDB_ID = "wandb_id"
REPORT = "report.html"
TASK_RESULTS = "lm_eval_{}.json"  # of lm-evaluation-harness, by the time of writing
EVALUATIONS = "evaluations"  # of evaluate --follow, see inference/following.py


def step_of(name: str) -> Optional[int]:
    """Returns the step that a checkpoint's folder of this name holds; None for any other name."""
    match = re.match(r"step_(\d+)$", name)
    return int(match.group(1)) if match else None


def committed_names(
    checkpoints: str,
    list_names: Callable[[str], List[str]] = os.listdir,
    is_there: Callable[[str], bool] = os.path.exists,
) -> List[str]:
    """Returns the names of the committed checkpoints in a folder, oldest first, whole or not; [] if there is no folder.

    list_names, is_there: how a folder is listed, and a file found. Raises OSError as they do.
    """
    try:
        names = list_names(checkpoints)
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps = sorted((step_of(name), name) for name in names if step_of(name) is not None)
    return [name for _, name in steps if is_there(os.path.join(checkpoints, name, COMMIT))]


def newest_checkpoint(run: str) -> str:
    """Returns the name of a run's newest committed checkpoint, whole or not; "" without one."""
    try:
        names = committed_names(os.path.join(run, CHECKPOINTS))
    except OSError:  # a transient error of the storage
        return ""
    return names[-1] if names else ""


def stop_mark(run: str) -> str:
    """Returns a mark of the file STOP in a run folder, by which a later one differs; "" if there is none. Raises OSError
    if the storage fails."""
    try:
        found = os.stat(os.path.join(run, STOP))
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return f"{found.st_ino}-{found.st_mtime_ns}"
