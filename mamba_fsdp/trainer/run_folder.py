"""Acquires the run folder, and writes the files of rank 0 other than checkpoints and metrics."""

import contextlib
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mamba_fsdp.data.source import Source
from mamba_fsdp.errors import UserError
from mamba_fsdp.run import records
from mamba_fsdp.run.layout import BUSY_RUN_REMEDY, check_is_run_folder, newest_step
from mamba_fsdp.run.lease import Lease
from mamba_fsdp.run.names import (
    CHECKPOINTS,
    LEASE,
    SETTINGS,
    SETTINGS_COPY,
    STARTING_REASON,
    TOKENIZER,
)
from mamba_fsdp.run.node_record import read_records
from mamba_fsdp.storage.retry import (
    copy_file,
    exists,
    is_file,
    is_folder,
    list_names,
    make_folder,
    read_bytes,
    stat_of,
    storage_error,
)

MAX_NODE_LOSSES = 100  # a start reports at most this many lost or sick nodes


class RunFolder:
    """The folder of a run. Each rank has such an object, but only rank 0 acquires the folder and writes to it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.lease = Lease(self.path / LEASE)
        self.earlier_seconds = 0.0  # total duration of the run's earlier commands, on rank 0
        # Nodes lost or sick since the previous start, on rank 0.
        self.node_losses: list[dict[str, Any]] = []
        # These functions of records.py raise LeaseLostError if another process has acquired the folder.
        self.write_status = partial(records.write_status, self.path, write=self.lease.write)
        self.add_event: Callable[..., None] = partial(
            records.add_event, self.path, write=self.lease.write
        )

    def acquire(self) -> None:
        """Creates the folder, acquires its lease, and removes unfinished files of killed runs.

        Raises UserError if the folder can't be written, contains something other than a run, or is in use by
        another process.
        """
        check_is_run_folder(self.path)
        checkpoints = self.path / CHECKPOINTS
        try:
            make_folder(checkpoints, parents=True)
            if stat_of(checkpoints).st_dev != stat_of(self.path).st_dev:
                raise UserError(
                    f"save_ckpt_path {self.path}: {CHECKPOINTS} is on another disk, and checkpoints can't be moved there; "
                    "set save_ckpt_path to a folder on that disk"
                )
            self.lease.acquire(partial(print, flush=True), BUSY_RUN_REMEDY)
        except OSError as error:
            raise storage_error(
                error,
                f"save_ckpt_path {self.path}: can't write {error.filename or LEASE} ({error.strerror})",
            ) from None
        # Write the status now, so that an earlier `finished` is replaced even if this start is killed.
        self.write_status("running", newest_step(self.path), STARTING_REASON)

    def read_node_losses(self) -> None:
        """Reads which nodes of the run were lost or sick since its last start."""
        last_start = ""
        for start in records.read_starts(self.path):
            last_start = str(start.get("time"))
        with contextlib.suppress(OSError):  # a run can continue without this record
            losses = read_records(str(self.path))[-MAX_NODE_LOSSES:]
            self.node_losses = [loss for loss in losses if str(loss.get("time")) >= last_start]

    def report_node_losses(self, step: int) -> None:
        """Adds an event for each lost or sick node. Called after the first step of this start.

        step: the number of this step.
        """
        for loss in self.node_losses:
            facts = {name: loss.get(name) for name in ("node", "reason")}
            seconds = round(time.time() - loss["last_seen"], 1)
            self.add_event(f"{loss.get('kind')}_node", step, **facts, seconds_to_next_step=seconds)
        self.node_losses = []

    def write_failure(self, step: int, error: BaseException) -> None:
        """Writes the status of a run that failed, if this process owns the lease.

        step: the last step; 0 means the step of the newest checkpoint. error: the reason.
        """
        status = "failed"
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt):
            status = "stopped"
            reason = "SIGINT"
        try:
            if self.lease.is_held():
                self.write_status(status, step or newest_step(self.path), reason)
        except (UserError, OSError) as another:  # a full disk must not hide the first failure
            print(f"warning: {another}", file=sys.stderr)

    def write_settings(self, text: str) -> str:
        """Writes the settings of this start to config.yaml and to a numbered copy. Returns the name of the copy.

        text: the settings as YAML. If they equal the newest copy, no other copy is written.
        """
        self.lease.write(self.path / SETTINGS, text)
        copies = SETTINGS_COPY.format(r"(\d+)")
        matches = [re.fullmatch(copies, name) for name in list_names(self.path)]
        newest = max((int(match[1]) for match in matches if match), default=0)
        copy = self.path / SETTINGS_COPY.format(newest)
        if not newest or read_bytes(copy) != text.encode():
            copy = self.path / SETTINGS_COPY.format(newest + 1)
            self.lease.write(copy, text)
        return copy.name

    def copy_tokenizer(self, data: Source) -> None:
        """Copies the tokenizer of a source, if it has one, so that the model can be used without the data.

        An earlier copy with other content is replaced.
        """
        target = self.path / TOKENIZER
        unfinished = self.lease.staging / TOKENIZER
        try:
            source = data.tokenizer_path
        except UserError:  # the source has no tokenizer
            return
        if _is_copy(source, target):
            return
        with self.lease.guard():
            _copy(source, unfinished)
        if exists(target):
            self.lease.remove(target)
        self.lease.move(unfinished, target)


def _is_copy(source: Path, target: Path) -> bool:
    """Returns whether `target` contains all files of `source` with the same content."""
    return all(
        is_file(target / name) and read_bytes(target / name) == read_bytes(source / name)
        for name in list_names(source)
    )


def _copy(source: Path, target: Path) -> None:
    """Copies a folder. Raises OSError with an errno, unlike shutil.copytree."""
    make_folder(target)
    for name in list_names(source):
        if is_folder(source / name):
            _copy(source / name, target / name)
        else:
            copy_file(source / name, target / name)
