"""Defines the file names in a run folder, and finds its committed checkpoints.

The launcher imports this module with the cluster's own Python, so it must run on Python 3.6.

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
# Numbered settings of a start; events.jsonl records the file of each start.
SETTINGS_COPY = "config.{}.yaml"
METRICS = "metrics.jsonl"
STEPS = "steps.jsonl"  # loss and gradient norm of every step, in full precision
EVENTS = "events.jsonl"  # starts, ends, checkpoints and faults, over all restarts
NODES = "nodes.jsonl"  # nodes that were lost or sick, see run/node_record.py
KERNELS = "kernels.json"  # the operators' backends on a GPU, see trainer/kernel_selection.py
CACHES = ".cache"  # the folder of compiled kernels, next to the run folders
STATUS = "status.json"
STARTING_REASON = "starting"  # the reason of the status `running` before the first step of a start
LEASE = "lease.json"
STOP = "STOP"  # the run stops when a user or the launcher creates this file
TOKENIZER = "tokenizer"  # the tokenizer of the data, stored next to the model
# Each start has a folder in STARTS, with the settings for its ranks, the reports of the nodes, and its outcome.
STARTS = "starts"
RESOLVED = "settings.json"
PREFLIGHT = "preflight"
VERDICT = "verdict.json"  # the result of the checks, in the folder PREFLIGHT
OUTCOME = "outcome.json"
# Environment variables of the ranks: the folder of their start, and the stop_file_id at the beginning of the start.
START_VARIABLE = "MAMBA_FSDP_START"
OLD_STOP_VARIABLE = "MAMBA_FSDP_OLD_STOP"
# The number of nodes that the job asked for, if it trains on fewer. The global batch is computed for this number.
WANTED_NODES_VARIABLE = "MAMBA_FSDP_WANTED_NODES"
CHECKPOINTS = "checkpoints"
STATE = "state.json"
COMMIT = "COMMIT"
KEEP_MARKER = "KEEP"  # a checkpoint that contains this file is never removed
MODEL_FOLDERS = "pth"
CONSOLIDATED = "consolidated.00.pth"
MODEL_CONFIG = "config.json"
PROFILE = "profile"
TENSORBOARD = "tensorboard"
WANDB_ID = "wandb_id"
REPORT = "report.html"
TASK_RESULTS = "lm_eval_{}.json"  # results of lm-evaluation-harness; {} is the time of writing
EVALUATIONS = "evaluations"  # the results of `evaluate --follow`, see inference/following.py


def step_of(name: str) -> Optional[int]:
    """Parses the step from the folder name of a checkpoint; returns None for any other name."""
    match = re.match(r"step_(\d+)$", name)
    return int(match.group(1)) if match else None


def committed_names(
    checkpoints: str,
    list_names: Callable[[str], List[str]] = os.listdir,
    is_there: Callable[[str], bool] = os.path.exists,
) -> List[str]:
    """Returns the names of the committed checkpoints in a folder, oldest first; [] if the folder does not exist.

    Their files are not verified. list_names: lists the names in a folder. is_there: returns whether a file exists.
    Raises the OSErrors of both functions, except if the folder does not exist.
    """
    try:
        names = list_names(checkpoints)
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps = sorted((step_of(name), name) for name in names if step_of(name) is not None)
    return [name for _, name in steps if is_there(os.path.join(checkpoints, name, COMMIT))]


def newest_checkpoint(run: str) -> str:
    """Returns the name of a run's newest committed checkpoint; "" if there is none. Does not verify its files."""
    try:
        names = committed_names(os.path.join(run, CHECKPOINTS))
    except OSError:  # a transient error of the storage
        return ""
    return names[-1] if names else ""


def stop_file_id(run: str) -> str:
    """Returns an identifier of the file STOP in a run folder; "" if there is none.

    A STOP file that is created later has another identifier. Raises OSError if the storage fails.
    """
    try:
        found = os.stat(os.path.join(run, STOP))
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return f"{found.st_ino}-{found.st_mtime_ns}"
