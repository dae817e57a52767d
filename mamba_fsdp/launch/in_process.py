"""Trains in this process, as a launcher's rank, as `python training.py` and as `mamba_fsdp.train` do."""

import os
import threading
from typing import TYPE_CHECKING, Any

from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import format_value
from mamba_fsdp.importing.builtin import make_missing_builtin
from mamba_fsdp.launch.machine import LAUNCHER, say_loading
from mamba_fsdp.launch.plan import check_folder, check_inputs
from mamba_fsdp.settings.resolve import resolve_settings
from mamba_fsdp.settings.train_config import TrainConfig

if TYPE_CHECKING:
    from mamba_fsdp.trainer.run import OnRecord, TrainResult


def train(
    config: str | None = None, on_record: "OnRecord | None" = None, **settings: Any
) -> "TrainResult":
    """Trains in this process and returns how that ended: `folder`, the run's; `stopped`, why it stopped before its last
    step, such as SIGTERM, else "" (a loop over trainings looks at it); `last`, the latest value of each key of
    metrics.jsonl, such as val_loss. The result can be used as a path, as in mamba_fsdp.load: it means the folder.
    The same call again resumes.

    settings: as training.py takes them, such as num_steps=100, dataset_path="data/mine". config: a YAML file
    or a ready run. on_record: rank 0 calls it with each entry of metrics.jsonl, a dict, once that is written; if it
    returns something true, all ranks stop as after a signal, within two steps and with a checkpoint. Raises UserError
    for mistakes in the settings and for runs that can't continue.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "train: call it from the main thread: only that can handle the signals that stop a run"
        )
    if on_record is not None and not callable(on_record):
        raise UserError(f"train: on_record={on_record} is not a function")
    words = {name: format_value(value) for name, value in settings.items() if value is not None}
    resolved = resolve_settings(words, config, where="in the call")
    prepare(resolved)
    return run(resolved, on_record)


def prepare(settings: TrainConfig) -> None:
    """Checks the inputs and makes the built-in data if it is needed and missing, before the import of libraries
    that take seconds. Only rank 0 does so; the other ranks wait for it when they connect. Raises UserError for missing
    inputs."""
    if os.environ.get("RANK", "0") != "0":
        return
    check_inputs(settings)
    check_folder(settings)
    if not settings.training.dry_run:
        make_missing_builtin(settings.data)
    if LAUNCHER not in os.environ:  # otherwise the launcher has said it
        say_loading()


def run(
    settings: TrainConfig,
    on_record: "OnRecord | None" = None,
    planned: tuple[int, int] | None = None,
) -> "TrainResult":
    from mamba_fsdp.interop.convert import publish
    from mamba_fsdp.trainer.run import run_training

    return run_training(settings, publish, on_record, planned)
