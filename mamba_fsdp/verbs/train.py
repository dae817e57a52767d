"""Training in this process, for training.py and for `mamba_fsdp.train`."""

import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mamba_fsdp.data.builtin import make_missing_builtin
from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import shown
from mamba_fsdp.launch.machine import LAUNCHER, begin_rank, processes_per_node, say_loading
from mamba_fsdp.launch.plan import check_folder, check_inputs
from mamba_fsdp.report.console import let_output_fail
from mamba_fsdp.settings.resolve import read_resolved, resolve_settings
from mamba_fsdp.settings.settings_page import settings_page as page  # noqa: F401
from mamba_fsdp.settings.train_config import TrainConfig

if TYPE_CHECKING:
    from mamba_fsdp.trainer.run import OnRecord, Trained


def main(*stray: str, config: str | None = None, resolved: str | None = None, **words: str) -> None:
    """Trains with the settings in `words`, or with those in the file `resolved`, which the launcher has checked and
    written."""
    begin_rank()
    if resolved:
        settings = read_resolved(Path(resolved))
    else:
        settings = resolve_settings(words, config, stray)
        try:
            prepare(settings)
        except KeyboardInterrupt:  # the work of the threads that make data/builtin is of no use
            os._exit(130)
    let_output_fail()
    if settings.training.dry_run:
        with tempfile.TemporaryDirectory() as scratch:
            tempfile.tempdir = os.environ["TMPDIR"] = scratch  # torch leaves folders there
            run(settings, planned=planned_ranks())
    else:
        run(settings)


def planned_ranks() -> tuple[int, int] | None:
    """Returns (ranks, ranks of a node) that 1.train.sbatch would start, if it asks this process alone for a dry run."""
    nodes = os.environ.get("MAMBA_FSDP_NODES")
    if not nodes:
        return None
    ranks_per_node = processes_per_node()
    return int(nodes) * ranks_per_node, ranks_per_node


def train(
    config: str | None = None, on_record: "OnRecord | None" = None, **settings: Any
) -> "Trained":
    """Trains in this process and returns how that ended: `folder`, the run's; `stopped`, why it stopped before its last
    step, else ""; `last`, the latest value of each key of metrics.jsonl, such as val_loss. Where a path is expected, as
    in mamba_fsdp.load, the result stands for the folder. The same call again resumes.

    settings: as training.py takes them: num_steps=100, dataset_path="data/mine". config: a YAML file
    or a ready run. on_record: rank 0 calls it with each entry of metrics.jsonl, a dict, once that is written; if it
    returns something true, all ranks stop as after a signal, within two steps and with a checkpoint. Raises UserError
    for mistakes in the settings and for runs that can't continue.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UserError("train: call it in the main thread, which gets the signals that stop it")
    if on_record is not None and not callable(on_record):
        raise UserError(f"train: on_record={on_record} is no function")
    words = {name: shown(value) for name, value in settings.items() if value is not None}
    resolved = resolve_settings(words, config, where="in the call")
    prepare(resolved)
    return run(resolved, on_record)


def prepare(settings: TrainConfig) -> None:
    """Checks the inputs and makes the built-in data if it is needed and missing, before libraries that take seconds to
    import. Only rank 0 does so; the other ranks wait where the ranks first meet. Raises UserError for missing
    inputs."""
    if os.environ.get("RANK", "0") != "0":
        return
    check_inputs(settings)
    check_folder(settings)
    if not settings.training.dry_run:
        make_missing_builtin(settings.data)
    if LAUNCHER not in os.environ:  # else the launcher has said it
        say_loading()


def run(
    settings: TrainConfig,
    on_record: "OnRecord | None" = None,
    planned: tuple[int, int] | None = None,
) -> "Trained":
    from mamba_fsdp.interop.convert import publish
    from mamba_fsdp.trainer.run import run_training

    return run_training(settings, publish, on_record, planned)
