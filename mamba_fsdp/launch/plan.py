"""Resolves the settings of a start: `python -m mamba_fsdp.launch.plan [ANSWER] [--SETTING=VALUE ...]`.

Writes into the file ANSWER, or prints, what a job has to know of them, as one JSON object:

    run_folder    the whole path of save_ckpt_path
    dry_run       whether nothing is to be trained
    missing_data  the whole path of the built-in data if the settings read it and it has to be made; ""
    settings      what they came to, which nodes and ranks read by settings.resolve.read_resolved
    paths         the whole paths that they name, for a container to mount
    replay        the words of the verb replay, if ranks are to do that in place of training; the run folder is scratch then
    batch         how a global batch is shared: the fields of launch.nodes.Batch

A wrong setting ends it with exit code 2, in seconds. --help shows the help page, and nothing is written.

Python 3.10 and PyYAML do, so that a mistake is reported before an image is unpacked on many nodes. Exit code 1 if the
words need more: those that are not written --name=value.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from mamba_fsdp import interpreter

if __name__ == "__main__":  # a caller of its functions keeps its own Ctrl-C
    interpreter.require_packages("yaml")

from mamba_fsdp import command_line
from mamba_fsdp.checkpoint.retention import check_disk_space
from mamba_fsdp.errors import UserError
from mamba_fsdp.importing.builtin import builtin_folder, missing_builtin
from mamba_fsdp.interop.places import find_origin
from mamba_fsdp.launch.machine import check_version
from mamba_fsdp.launch.nodes import Batch
from mamba_fsdp.model.spec import parameter_count
from mamba_fsdp.run.layout import CHECKPOINT_BYTES_PER_PARAMETER, IN_USE_ADVICE, list_committed
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
from mamba_fsdp.storage.patience import exists, is_folder


def plan(answer: Path, *stray: str, config: str | None = None, **words: str) -> None:
    """Writes what the settings in `words` come to into the file `answer`."""
    trains_in_image = os.environ.get("IMAGE")
    if not trains_in_image:
        check_version()
    if stray[:1] == ("replay",):
        answer.write_text(json.dumps(plan_of_replay(*stray[1:], **words)))
        return
    if os.environ.get("PROFILE") == "torch":
        words.setdefault("use_profiler", "true")
    settings = resolve_settings(words, config, stray)
    if not trains_in_image:  # else preflight finds what is missing
        check_inputs(settings)
    check_folder(settings)
    resolved = {
        "run_folder": os.path.abspath(settings.checkpoint.save_ckpt_path),
        "dry_run": settings.training.dry_run,
        "missing_data": str(missing_builtin(settings.data) or ""),
        "settings": as_json_object(settings),
        "paths": named_paths(settings),
        "replay": [],
        "batch": shared_batch(settings),
    }
    answer.write_text(json.dumps(resolved))


def plan_of_replay(run: str = "", *stray: str, **options: str) -> dict[str, Any]:
    """Returns the plan of `replay RUN`. Its files of a start lie in a folder beside RUN, which goes away afterwards. Raises
    UserError if there is no run."""
    if not run:
        raise UserError("replay: name the run, as in replay runs/demo")
    if not exists(Path(run, SETTINGS)):
        from mamba_fsdp.importing.kinds import unexpected_path_error

        raise unexpected_path_error(run, "a run")
    place = Path(run).resolve()
    scratch = place.with_name(f".{place.name}.replay-{os.getpid()}")
    settings = read_settings_copy(place / SETTINGS)
    settings = settings.with_values(
        save_ckpt_path=str(scratch), load_ckpt_path=str(place), init_from="", dry_run=False
    )
    words = [str(place), *stray, *(f"--{name}={value}" for name, value in options.items())]
    return {
        "run_folder": str(scratch),
        "dry_run": False,
        "missing_data": "",
        "settings": as_json_object(settings),
        "paths": named_paths(settings),
        "replay": words,
        "batch": shared_batch(settings),
    }


def shared_batch(settings: TrainConfig) -> Batch:
    """Returns how the global batch is shared among ranks."""
    training = settings.training
    of_rank = training.batch_size * training.gradient_accumulation_steps
    return Batch(training.global_batch_size, of_rank, settings.parallel.context_parallel)


def check_inputs(settings: TrainConfig) -> None:
    """Raises UserError where what a run starts from or reads is not there."""
    find_origin(settings.checkpoint)
    if not settings.data.use_dummy_dataset and not builtin_folder(settings.data):
        from mamba_fsdp.data.selection import training_sources, validation_sources  # numpy

        training_sources(settings.data)
        validation_sources(settings.data)


def check_folder(settings: TrainConfig) -> None:
    """Raises UserError where the run folder holds something else than this run, can't be written, has no room for a
    checkpoint, or is in use by a process of this machine; the others are found by who takes the folder."""
    check_run_folder(settings)
    if settings.training.dry_run:
        return
    folder = Path(os.path.abspath(settings.checkpoint.save_ckpt_path))
    place = _place_of(folder)
    if not (is_folder(place) and os.access(place, os.W_OK)):
        raise UserError(f"save_ckpt_path: can't write to {folder}")
    lease = Lease(folder / LEASE)
    look = lease.read_snapshot()
    if look and look.is_alive():
        lease.check_unused(IN_USE_ADVICE)
    if not settings.checkpoint.starts_from_model():  # which decides the size of the model
        check_space(settings, 1)


def check_space(settings: TrainConfig, of_new_run: int) -> None:
    """Raises UserError where the disk has no room for the next checkpoint of a run, or for so many of a new run."""
    folder = Path(os.path.abspath(settings.checkpoint.save_ckpt_path))
    earlier = list_committed(folder / CHECKPOINTS)
    size = CHECKPOINT_BYTES_PER_PARAMETER
    if settings.optimizer.optimizer == "muon":
        size -= 4  # at the least: its matrices have one moment
    count = 1 if earlier else of_new_run
    check_disk_space(_place_of(folder), earlier, size * parameter_count(settings.model), count)


def _place_of(folder: Path) -> Path:
    """Returns the folder, or where it is to be made."""
    return next(place for place in (folder, *folder.parents) if exists(place))


def named_paths(settings: TrainConfig) -> list[str]:
    """Returns the absolute paths that settings name. They need not be there: a container that sees the project alone has
    none of the others, which is why the script looks for symbolic links in them."""
    paths = []
    for name, (_, leaf) in all_settings().items():
        value = settings.value(name)
        if leaf.metadata["is_path"] and value:
            paths.append(os.path.abspath(value))
    return paths


if __name__ == "__main__":
    names_file = len(sys.argv) > 1 and not sys.argv[1].startswith("-")
    answer = sys.argv.pop(1) if names_file else "/dev/stdout"
    try:
        command_line.run(partial(plan, Path(answer)), settings_page)
    except ModuleNotFoundError:  # fire, which the image has
        raise SystemExit(1) from None
