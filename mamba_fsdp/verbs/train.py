"""The command line of `mamba-fsdp train` and of training.py, the program that a launcher starts for each rank."""

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mamba_fsdp.launch.in_process import prepare, run
from mamba_fsdp.launch.machine import processes_per_node, set_up_rank_signals
from mamba_fsdp.reporting.console import ignore_output_errors
from mamba_fsdp.settings.resolve import read_resolved, resolve_settings
from mamba_fsdp.settings.settings_page import settings_page as page  # noqa: F401


def main(*stray: str, config: str | None = None, resolved: str | None = None, **args: str) -> int:
    """Trains a model. Returns the exit code.

    stray: arguments that are not of the form --name=value; they are an error. config: a settings file. args: {name: text} of
    the settings. resolved: a file with all settings, checked and written by the launcher; it replaces the other arguments."""
    set_up_rank_signals()
    if resolved:
        settings = read_resolved(Path(resolved))
    else:
        settings = resolve_settings(args, config, stray)
        try:
            prepare(settings)
        except KeyboardInterrupt:  # exit without waiting for the threads that make data/builtin
            os._exit(130)
    ignore_output_errors()
    if settings.training.dry_run:
        with scratch_folder():
            run(settings, planned=planned_ranks())
        return 0
    return exit_code(run(settings).stopped)


def exit_code(stopped: str) -> int:
    """Returns the exit code of a training: 0, or 128 plus the number of the signal that stopped it, as in a shell. Under
    torchrun, returns 0 in both cases.

    stopped: the reason why the training stopped; the name of the signal if a signal stopped it."""
    # Under torchrun the code is always 0. torchrun considers other codes a failure, and kills the ranks that are still
    # writing the checkpoint.
    if "RANK" in os.environ or stopped not in signal.Signals.__members__:
        return 0
    return 128 + signal.Signals[stopped]


@contextlib.contextmanager
def scratch_folder() -> Iterator[None]:
    """Uses a new temporary folder within the block, and removes it afterwards, because torch does not remove the temporary
    folders that it creates."""
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TMPDIR"] = scratch
        tempfile.tempdir = None  # makes tempfile read TMPDIR again
        try:
            yield
        finally:
            tempfile.tempdir = None
            del os.environ["TMPDIR"]
            if before is not None:
                os.environ["TMPDIR"] = before


def planned_ranks() -> tuple[int, int] | None:
    """Returns (number of ranks, ranks per node) of the training that 1.train.sbatch would start. Returns None unless this
    process is the dry run of 1.train.sbatch."""
    nodes = os.environ.get("MAMBA_FSDP_NODES")
    if not nodes:
        return None
    ranks_per_node = processes_per_node()
    return int(nodes) * ranks_per_node, ranks_per_node
