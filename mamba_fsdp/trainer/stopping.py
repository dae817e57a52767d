"""Receives requests to stop a run.

A run can be asked to stop by SIGTERM, SIGINT, SIGUSR1 or SIGHUP, by a file STOP in the run folder or in the folder of
this start, and by the caller's `on_record` function. It then completes its step, commits a checkpoint and exits. Under
nohup, SIGHUP is ignored, so that training continues after the terminal is closed.

A STOP file that is older than the start was meant for an earlier start. Rank 0 removes it after acquiring the run
folder.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run.names import OLD_STOP_VARIABLE, START_VARIABLE, STOP, stop_file_id
from mamba_fsdp.storage.retry import (
    MISSING_ERRNOS,
    TRANSIENT_ERRNOS,
    delete,
    read_once,
    retry_io,
)

OnRecord = Callable[[dict], object]
POLL_SECONDS = 1.0  # interval of checks for STOP files: each check is a round trip to a shared disk


class StopRequest:
    """The requests to stop that this rank has received. Enter this context manager after acquiring the run folder.

    reason: why the run must stop; "" if there is no request. Only rank 0 checks for STOP files: the user creates one
    in the run folder, and the launcher in the folder of this start. The text in the file is the reason.

    on_record: a function of the caller. It gets each entry of metrics.jsonl, and asks the run to stop by returning a
    true value. remove: removes the user's STOP file. For a run it is `Lease.remove`.
    """

    def __init__(
        self,
        run_folder: Path,
        on_rank0: bool,
        on_record: OnRecord | None = None,
        remove: Callable[[Path], object] = delete,
    ) -> None:
        self.on_record = on_record
        self.remove = remove
        self.reason = ""
        self.interrupted = False
        self.has_stepped = False  # whether the first step is complete; the loop sets it
        self.next_poll = 0.0
        # Under torchrun, the launcher prints the message about the stop.
        self.announces = on_rank0 and "TORCHELASTIC_RUN_ID" not in os.environ
        self.run_folder = run_folder
        self.files: list[Path] = []
        if on_rank0:
            self.files.append(run_folder / STOP)
            if START_VARIABLE in os.environ:
                self.files.append(Path(os.environ[START_VARIABLE], STOP))
        self.old_stop_id = os.environ.get(OLD_STOP_VARIABLE)
        if self.old_stop_id is None:
            self.old_stop_id = self._stop_file_id()

    def __enter__(self) -> "StopRequest":
        if self.old_stop_id and self._stop_file_id() == self.old_stop_id:
            self._remove_user_stop_file()
        signals = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signals.append(signal.SIGHUP)
        self.previous_handlers = {
            number: signal.signal(number, self._on_signal) for number in signals
        }
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)
        # The STOP file is kept after a failure, so that the launcher does not restart the run.
        if kind is None:
            self._remove_user_stop_file()

    def _stop_file_id(self) -> str:
        """Returns the result of names.stop_file_id for the user's STOP file on rank 0, and "" on other ranks."""
        if not self.files:
            return ""
        return retry_io(stop_file_id, self.run_folder, str(self.run_folder))

    def _remove_user_stop_file(self) -> None:
        if self.files:
            with contextlib.suppress(OSError, UserError):
                self.remove(self.files[0])

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT:
            if self.interrupted or not self.has_stepped:
                raise KeyboardInterrupt  # a second Ctrl-C, or one before the first step has ended
            self.interrupted = True
        if not self.reason:
            self.reason = signal.Signals(number).name
            if self.announces:
                print(
                    f"\n{self.reason}: stopping after the current step and a checkpoint (immediately if no step has begun)",
                    file=sys.stderr,
                    flush=True,
                )

    def handle_record(self, record: dict) -> None:
        """Passes an entry of metrics.jsonl to the caller's function. Only rank 0 calls it."""
        if self.on_record and self.on_record(record):
            self.reason = self.reason or "on_record"

    def check(self) -> bool:
        """Returns whether this rank has been asked to stop."""
        if self.files and not self.reason and time.monotonic() >= self.next_poll:
            self.reason = next(filter(None, map(_read_reason, self.files)), "")
            self.next_poll = time.monotonic() + POLL_SECONDS
        return bool(self.reason)

    def any_rank_asked(self, world: World) -> bool:
        """Returns whether any rank has been asked to stop. All ranks call it."""
        # The sum is computed on the device. A validation calls this for each batch, and gloo's ring over the host takes a
        # time proportional to the number of ranks.
        asked = torch.tensor(float(self.check()), dtype=torch.float64, device=world.device)
        return bool(world.all_reduce_sum(asked) > 0)


def _read_reason(file: Path) -> str:
    """Returns the first 80 characters of a STOP file, "STOP file" if it is empty, or "" if it does not exist."""
    try:
        content, _ = read_once(file)
    except OSError as error:
        # A missing file and a transient error of the storage are not requests to stop. Anything else with this
        # name is a request, for example a folder.
        return "" if error.errno in (*MISSING_ERRNOS, *TRANSIENT_ERRNOS) else "STOP file"
    return " ".join(content.decode(errors="replace").split())[:80] or "STOP file"
