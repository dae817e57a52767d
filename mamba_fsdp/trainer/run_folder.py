"""The run folder of a run: who may write into it, and its status for others to read."""

import filecmp
import shutil
import sys
import time
from functools import partial
from pathlib import Path

from mamba_fsdp.data.source import Source
from mamba_fsdp.errors import UserError
from mamba_fsdp.lease import Lease
from mamba_fsdp.report import records
from mamba_fsdp.run_layout import (
    CHECKPOINTS,
    LEASE,
    STATUS,
    TOKENIZER,
    check_is_run_folder,
    newest_step,
)
from mamba_fsdp.storage import remove_unwritten, retry_io


class RunFolder:
    """`path`, which rank 0 acquires for the run, and what it writes there besides checkpoints and
    metrics."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.opened = time.time()  # seconds since the epoch
        self.lease = Lease(self.path / LEASE)

    def acquire(self) -> None:
        """Makes the folder and takes its lease. Raises UserError where that can't be or it is
        another's."""
        check_is_run_folder(self.path)
        checkpoints = self.path / CHECKPOINTS
        try:
            retry_io(partial(checkpoints.mkdir, parents=True, exist_ok=True), self.path)
            remedy = "stop that run first, or give this one another save_ckpt_path"
            self.lease.take(partial(print, flush=True), remedy)
            remove_unwritten(self.path / STATUS)
        except OSError as error:
            raise UserError(
                f"save_ckpt_path {self.path}: can't write {error.filename} ({error.strerror})"
            ) from None
        # At once, so that whatever ends the start, even a kill, the last run's status (`finished`)
        # is gone.
        records.write_status(self.path, "running", newest_step(self.path), "starting")

    def write_status(self, status: str, step: int, reason: str = "") -> None:
        """Writes status.json, see records.write_status."""
        records.write_status(self.path, status, step, reason, self.lease.check)

    def write_failure(self, step: int, error: BaseException) -> None:
        """Writes why the run failed, if it holds the folder. step: 0 means that of the newest
        checkpoint."""
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

    def copy_tokenizer(self, data: Source) -> None:
        """Copies the tokenizer of a source that has one, so that the model can be used when the
        data is gone; in place of another."""
        target = self.path / TOKENIZER
        partial_copy = self.path / f".{TOKENIZER}.partial"
        try:
            source = data.tokenizer_path
        except UserError:  # none is known
            return
        names = [path.name for path in source.iterdir()]
        same, _, _ = filecmp.cmpfiles(source, target, names, shallow=False)
        if len(same) == len(names):
            return
        shutil.rmtree(partial_copy, ignore_errors=True)
        shutil.copytree(source, partial_copy)
        shutil.rmtree(target, ignore_errors=True)
        partial_copy.rename(target)
