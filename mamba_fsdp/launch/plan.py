"""Resolves the settings of a start.

    python -m mamba_fsdp.launch.plan [ANSWER] [--SETTING=VALUE ...]

Writes one JSON object to the file ANSWER, or to stdout, with the fields that a job needs:

    run_folder    the absolute path of save_ckpt_path
    dry_run       whether the training is only described
    missing_data  the absolute path of the built-in data if the settings use it and it has to be made; else ""
    settings      the resolved settings, for settings.resolve.read_resolved on the nodes and ranks
    paths         the absolute paths in the settings, for a container to mount
    replay        the arguments of the verb replay if the ranks run it instead of a training; the run folder is then
                  temporary
    batch         the division of the global batch: the fields of launch.nodes.Batch

An invalid setting ends the program with exit code 2 within seconds. --help prints the help page and
writes no object.

The program needs only Python 3.10 and PyYAML, so mistakes are reported before an image is
unpacked on many nodes. Arguments that are not written as --name=value also need fire. If fire is
not installed, the exit code is 1.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

from mamba_fsdp import interpreter

if __name__ == "__main__":  # an import must not change signal handlers
    interpreter.require_packages("yaml")

from mamba_fsdp import command_line
from mamba_fsdp.checkpoint.retention import check_disk_space
from mamba_fsdp.errors import UserError
from mamba_fsdp.importing.builtin import builtin_folder, missing_builtin
from mamba_fsdp.interop.places import find_origin
from mamba_fsdp.launch.machine import check_version
from mamba_fsdp.launch.nodes import Batch
from mamba_fsdp.model.spec import parameter_count
from mamba_fsdp.run.layout import BUSY_RUN_REMEDY, CHECKPOINT_BYTES_PER_PARAMETER, list_committed
from mamba_fsdp.run.lease import Lease
from mamba_fsdp.run.names import CHECKPOINTS, LEASE, SETTINGS
from mamba_fsdp.settings.resolve import (
    as_json_object,
    check_run_folder,
    read_settings_copy,
    resolve_settings,
)
from mamba_fsdp.settings.settings_page import settings_page
from mamba_fsdp.settings.train_config import TrainConfig, all_settings
from mamba_fsdp.storage.retry import exists, is_folder


def plan(answer: Path, *stray: str, config: str | None = None, **args: str) -> None:
    """Resolves the settings in the arguments, and writes the plan to the file `answer`.

    stray: the arguments that are not of the form --name=value. After "replay" they are the arguments of that verb, and
    otherwise they are an error. config: a settings file. args: {name: text} of the settings."""
    trains_in_image = os.environ.get("IMAGE")
    if not trains_in_image:
        check_version()
    missing_data = None
    replay_args: list[str] = []
    if stray[:1] == ("replay",):
        settings, replay_args = replay_settings(*stray[1:], **args)
    else:
        if os.environ.get("PROFILE") == "torch":
            args.setdefault("use_profiler", "true")
        settings = resolve_settings(args, config, stray)
        if not trains_in_image:  # preflight checks the inputs if there is an image
            check_inputs(settings)
        check_folder(settings)
        missing_data = missing_builtin(settings.data)
    training = settings.training
    resolved = {
        "run_folder": os.path.abspath(settings.checkpoint.save_ckpt_path),
        "dry_run": training.dry_run,
        "missing_data": str(missing_data or ""),
        "settings": as_json_object(settings),
        "paths": find_named_paths(settings),
        "replay": replay_args,
        "batch": Batch(
            training.global_batch_size,
            training.batch_size * training.gradient_accumulation_steps,
            settings.parallel.context_parallel,
        ),
    }
    answer.write_text(json.dumps(resolved))


def replay_settings(run: str = "", *stray: str, **options: str) -> tuple[TrainConfig, list[str]]:
    """Returns the settings of `replay RUN`, and the arguments of the verb replay.

    The run folder in the settings is a temporary folder next to RUN. stray, options: further arguments of the verb, which
    are returned unchanged; the verb checks them.

    Raises UserError if RUN is missing or not a run.
    """
    if not run:
        raise UserError("replay: the run is missing; for example: replay runs/demo")
    if not exists(Path(run, SETTINGS)):
        from mamba_fsdp.importing.kinds import unexpected_path_error

        raise unexpected_path_error(run, "a run")
    place = Path(run).resolve()
    scratch = place.with_name(f".{place.name}.replay-{os.getpid()}")
    settings = read_settings_copy(place / SETTINGS)
    settings = settings.with_values(
        save_ckpt_path=str(scratch), load_ckpt_path=str(place), init_from="", dry_run=False
    )
    return settings, [str(place), *stray, *(f"--{name}={value}" for name, value in options.items())]


def check_inputs(settings: TrainConfig) -> None:
    """Raises UserError if the starting point or the data of the run does not exist."""
    find_origin(settings.checkpoint)
    if not settings.data.use_dummy_dataset and not builtin_folder(settings.data):
        # Imported late, because it imports numpy.
        from mamba_fsdp.data.selection import training_sources, validation_sources

        training_sources(settings.data)
        validation_sources(settings.data)


def check_folder(settings: TrainConfig) -> None:
    """Raises UserError if the run can't use its run folder.

    Checks whether the folder contains another run, can't be written, has too little disk space for
    a checkpoint, or is in use by a process of this machine. Processes of other machines are
    detected later, when the run acquires its lease.
    """
    check_run_folder(settings)
    if settings.training.dry_run:
        return
    folder = Path(os.path.abspath(settings.checkpoint.save_ckpt_path))
    place = _nearest_existing(folder)
    if not (is_folder(place) and os.access(place, os.W_OK)):
        raise UserError(
            f"save_ckpt_path: can't write to {folder}; choose another folder, or make this one writable"
        )
    lease = Lease(folder / LEASE)
    holder = lease.read_snapshot()
    if holder and holder.is_alive():
        lease.check_unused(BUSY_RUN_REMEDY)
    # A run that starts from another model gets its size from that model, which has not been read yet.
    if not settings.checkpoint.starts_from_model():
        check_space(settings, 1)


def check_space(settings: TrainConfig, checkpoints_of_new_run: int) -> None:
    """Raises UserError if the disk has too little space for the next checkpoint of a run.

    checkpoints_of_new_run: the number of checkpoints that must fit for a run without checkpoints.
    """
    folder = Path(os.path.abspath(settings.checkpoint.save_ckpt_path))
    earlier = list_committed(folder / CHECKPOINTS)
    size = CHECKPOINT_BYTES_PER_PARAMETER
    if settings.optimizer.optimizer == "muon":
        size -= 4  # a lower bound, because Muon keeps one moment for matrices
    count = 1 if earlier else checkpoints_of_new_run
    check_disk_space(
        _nearest_existing(folder), earlier, size * parameter_count(settings.model), count
    )


def _nearest_existing(folder: Path) -> Path:
    """Returns the folder, or its nearest parent that exists."""
    return next(place for place in (folder, *folder.parents) if exists(place))


def find_named_paths(settings: TrainConfig) -> list[str]:
    """Returns the absolute paths in the settings. The paths need not exist.

    This function does not follow symbolic links. It can run in a container that contains only the
    project, so its caller on the host looks for symbolic links in the paths.
    """
    paths = []
    for name, (_, field) in all_settings().items():
        value = settings.value(name)
        if field.metadata["is_path"] and value:
            paths.append(os.path.abspath(value))
    return paths


if __name__ == "__main__":
    names_file = len(sys.argv) > 1 and not sys.argv[1].startswith("-")
    answer = sys.argv.pop(1) if names_file else "/dev/stdout"
    try:
        command_line.run(partial(plan, Path(answer)), settings_page)
    except ModuleNotFoundError:  # fire is not installed here; the image has it
        raise SystemExit(1) from None
