"""Asking a run to stop: SIGTERM, SIGINT, SIGUSR1, or a file STOP in the run folder. The step ends and a checkpoint is
committed."""

import signal
import sys
import time
from pathlib import Path

from mamba_fsdp.run_layout import STOP

SECONDS_BETWEEN_LOOKS = 1.0  # a look at the STOP file is a round trip on a shared file system


class StopRequest:
    """Notices requests on this rank; `reason` is "" until there is one. Only rank 0 looks for the file."""

    def __init__(self, run_folder: Path, on_rank0: bool) -> None:
        self.reason, self.interrupted, self.next_look = "", False, 0.0
        self.file = run_folder / STOP if on_rank0 else None
        if self.file:
            self.file.unlink(missing_ok=True)  # it was for a run that is over

    def __enter__(self) -> "StopRequest":
        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        self.previous_handlers = {number: signal.signal(number, self._on_signal) for number in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)
        if self.file:
            self.file.unlink(missing_ok=True)

    def _on_signal(self, number, _frame):
        if number == signal.SIGINT and self.interrupted:
            raise KeyboardInterrupt  # Ctrl-C twice: the user does not want to wait for the checkpoint
        self.interrupted = self.interrupted or number == signal.SIGINT
        self.reason = signal.Signals(number).name
        if self.file:
            print(f"\n{self.reason}: stopping after this step, with a checkpoint", file=sys.stderr, flush=True)

    def look(self) -> bool:
        """Whether a stop has been asked for on this rank."""
        if self.file and not self.reason and time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
            if self.file.exists():
                self.reason = "STOP file"
        return bool(self.reason)
