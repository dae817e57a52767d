"""The run folder of a run: who may write into it, and its status for others to read."""

import contextlib
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
    committed,
    step_of,
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
        records.write_status(self.path, "running", self._newest_step(), "starting")

    def write_status(self, status: str, step: int, reason: str = "") -> None:
        """Writes status.json, see records.write_status."""
        records.write_status(self.path, status, step, reason, self.lease.check)

    def status(self) -> dict:
        """Returns the content of status.json, {} where there is none. What it says of a run that
        has ended without a word, by kill -9 or for want of memory, is corrected first, where that
        can be known."""
        status = records.read_status(self.path)
        if status.get("status") != "running":
            return status
        with contextlib.suppress(UserError, OSError):
            holder = self.lease.look()
            if holder and holder.has_ended():
                reason = f"killed: the run of {holder}"
                status |= {"status": "failed", "step": self._newest_step(), "reason": reason}
                records.write_status(self.path, "failed", status["step"], reason)
        return status

    def write_failure(self, step: int, error: BaseException) -> None:
        """Writes why the run failed, if it holds the folder. step: 0 means that of the newest
        checkpoint."""
        try:
            if self.lease.is_held():
                reason = f"{type(error).__name__}: {error}"
                self.write_status("failed", step or self._newest_step(), reason)
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

    def _newest_step(self) -> int:
        """Of the committed checkpoints, whole or not; 0 where there is none."""
        steps = [step_of(path.name) or 0 for path in committed(self.path / CHECKPOINTS)]
        return max(steps, default=0)
