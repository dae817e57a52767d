"""Runs the command line of training.py, which a launcher starts for each rank, and of `mamba-fsdp train`."""

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


def main(*stray: str, config: str | None = None, resolved: str | None = None, **words: str) -> int:
    """Trains with the settings in `words`, or with those in the file `resolved`, which the launcher has checked and
    written. Returns the exit code."""
    set_up_rank_signals()
    if resolved:
        settings = read_resolved(Path(resolved))
    else:
        settings = resolve_settings(words, config, stray)
        try:
            prepare(settings)
        except KeyboardInterrupt:  # the work of the threads that make data/builtin is of no use
            os._exit(130)
    ignore_output_errors()
    if settings.training.dry_run:
        with scratch_folder():
            run(settings, planned=planned_ranks())
        return 0
    return exit_code(run(settings).stopped)


def exit_code(stopped: str) -> int:
    """Returns the exit code of a training that ended because of `stopped`: a shell's for the signal of this name, else 0."""
    # torchrun takes any code but 0 for a failure, and kills the ranks that still write the checkpoint.
    if "RANK" in os.environ or stopped not in signal.Signals.__members__:
        return 0
    return 128 + signal.Signals[stopped]


@contextlib.contextmanager
def scratch_folder() -> Iterator[None]:
    """Gives libraries a temporary folder of the block's own: torch leaves others behind."""
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TMPDIR"] = scratch
        tempfile.tempdir = None  # so that Python looks again
        try:
            yield
        finally:
            tempfile.tempdir = None
            del os.environ["TMPDIR"]
            if before is not None:
                os.environ["TMPDIR"] = before


def planned_ranks() -> tuple[int, int] | None:
    """Returns (ranks, ranks of a node) that 1.train.sbatch would start, if it asks this process alone for a dry run."""
    nodes = os.environ.get("MAMBA_FSDP_NODES")
    if not nodes:
        return None
    ranks_per_node = processes_per_node()
    return int(nodes) * ranks_per_node, ranks_per_node
