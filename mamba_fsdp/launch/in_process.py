"""Trains in the current process. `python training.py`, the ranks of a launcher and
`mamba_fsdp.train` use this module.
"""

import os
import threading
from typing import TYPE_CHECKING, Any

from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import format_value
from mamba_fsdp.importing.builtin import make_missing_builtin
from mamba_fsdp.launch.machine import LAUNCHER, print_loading
from mamba_fsdp.launch.plan import check_folder, check_inputs
from mamba_fsdp.settings.resolve import resolve_settings
from mamba_fsdp.settings.train_config import TrainConfig

if TYPE_CHECKING:
    from mamba_fsdp.trainer.run import OnRecord, TrainResult


def train(
    config: str | None = None, on_record: "OnRecord | None" = None, **settings: Any
) -> "TrainResult":
    """Trains in this process. Calling it again with the same settings resumes the run.

    settings: settings of training.py, such as num_steps=100, dataset_path="data/mine". config: a
    YAML file with settings, or the name of a ready run. on_record: called on rank 0 with each entry
    of metrics.jsonl, a dict, after it has been written. If it returns a true value, all ranks write
    a checkpoint and stop within two steps.

    Returns an object with the attributes `folder`, the run folder; `stopped`, why the run stopped
    before its last step, such as "SIGTERM", else ""; and `last`, the latest value of each key of
    metrics.jsonl, such as val_loss. Functions that take a run folder, such as mamba_fsdp.load,
    accept the object itself.

    Raises UserError for invalid settings and for runs that can't continue.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "call mamba_fsdp.train from the main thread, because only this thread can handle the signals that stop a run"
        )
    if on_record is not None and not callable(on_record):
        raise UserError(
            f"train: on_record={on_record} is not callable; give a function of one record"
        )
    args = {name: format_value(value) for name, value in settings.items() if value is not None}
    resolved = resolve_settings(args, config, where="in the call")
    prepare(resolved)
    return run(resolved, on_record)


def prepare(settings: TrainConfig) -> None:
    """Checks the inputs, and makes the built-in data if it is missing, before slow libraries are
    imported.

    Only rank 0 does so; the other ranks wait for rank 0 when they connect. Raises UserError for missing
    inputs, and for a run folder that the run can't use.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    check_inputs(settings)
    check_folder(settings)
    if not settings.training.dry_run:
        make_missing_builtin(settings.data)
    if LAUNCHER not in os.environ:  # otherwise the launcher has printed this line
        print_loading()


def run(
    settings: TrainConfig,
    on_record: "OnRecord | None" = None,
    planned: tuple[int, int] | None = None,
) -> "TrainResult":
    """Trains with resolved settings. `planned` is passed to trainer.run.run_training."""
    from mamba_fsdp.interop.convert import publish
    from mamba_fsdp.trainer.run import run_training

    return run_training(settings, publish, on_record, planned)
