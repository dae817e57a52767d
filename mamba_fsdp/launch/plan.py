"""What 1.train.sbatch has to know of the settings: `python -m mamba_fsdp.launch.plan [--SETTING=VALUE ...]`.

Prints one a line: the run folder, the folder of the built-in data (an empty line where other data is
read), then those that a container needs beside the project. A bad setting ends it with exit code 2,
in seconds.
"""

import dataclasses
import os
from pathlib import Path

from mamba_fsdp import interpreter

interpreter.need("fire", "yaml")

from mamba_fsdp import command_line
from mamba_fsdp.data.builtin import builtin_folder
from mamba_fsdp.interop.places import check_place
from mamba_fsdp.launch.machine import PROJECT, check_version
from mamba_fsdp.run_layout import CHECKPOINTS, check_exists, check_is_run_folder, committed
from mamba_fsdp.settings import resolve
from mamba_fsdp.settings.settings_page import settings_page
from mamba_fsdp.settings.train_config import TrainConfig


def plan(*stray, config=None, **given) -> None:  # the command line would check what has a type
    check_version()
    settings, _ = resolve.resolve_settings(given, config, stray)
    resolve.check_experiment(settings)
    check_is_run_folder(settings.checkpoint.save_ckpt_path)
    if not os.environ.get("IMAGE"):  # which sees no folder yet that settings name: preflight will
        check_places(settings)
    print(
        os.path.abspath(settings.checkpoint.save_ckpt_path),
        builtin_folder(settings.data) or "",
        *folders_outside_project(settings),
        sep="\n",
    )


def check_places(settings: TrainConfig) -> None:
    """Raises UserError where what a run starts from or reads is not there."""
    checkpoint = settings.checkpoint
    check_exists(checkpoint.load_ckpt_path, checkpoint.save_ckpt_path)
    if checkpoint.init_from and not committed(Path(checkpoint.save_ckpt_path, CHECKPOINTS)):
        check_place(checkpoint.init_from)
    if not settings.data.use_dummy_dataset and not builtin_folder(settings.data):
        from mamba_fsdp.data.selection import training_sources, validation_sources  # numpy

        training_sources(settings.data)
        validation_sources(settings.data)


def folders_outside_project(settings: TrainConfig) -> list[Path]:
    """Absolute paths named by the settings, and where symbolic links lead from them, unless they lie in the project.

    What is there is not asked: the container that this runs in does not see where links lead out of the project.
    """
    named: set[Path] = set()
    for section in dataclasses.asdict(settings).values():
        texts = [value for value in section.values() if isinstance(value, str)]
        named.update(Path(os.path.abspath(text)) for text in texts)
    folders = named | {path.resolve() for path in named}
    return sorted(folder for folder in folders if not folder.is_relative_to(PROJECT))


if __name__ == "__main__":
    command_line.run(plan, settings_page)
