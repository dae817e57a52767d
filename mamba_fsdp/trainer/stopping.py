"""Asking a run to stop: SIGTERM, SIGINT, SIGUSR1, SIGHUP, a file STOP in the run folder, or the caller's
function that gets its records. The run ends its step, commits a checkpoint and exits. Under nohup,
SIGHUP (the terminal closed) is ignored and training continues. A STOP file from before a start is meant
for an earlier run; 1.train.sbatch or verbs/train.py removes it."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mamba_fsdp.parallel.world import World
from mamba_fsdp.run.names import STOP

OnRecord = Callable[[dict], object]
SECONDS_BETWEEN_LOOKS = 1.0  # at the STOP file: each look is a round trip to a shared disk


class StopRequest:
    """The requests to stop that reach this rank. `reason` is "" until there is one. Only rank 0
    looks for the STOP file, whose text is the reason.

    on_record: the caller's function, which gets each record of the metrics and asks the run to stop by
    returning something true."""

    def __init__(self, run_folder: Path, on_rank0: bool, on_record: OnRecord | None = None) -> None:
        self.on_record = on_record
        self.reason = ""
        self.interrupted = False
        self.has_stepped = False  # set by the loop
        self.next_look = 0.0
        # Under torchrun, the launcher announces the stop.
        self.announces = on_rank0 and "TORCHELASTIC_RUN_ID" not in os.environ
        self.file: Path | None = None
        if on_rank0:
            self.file = run_folder / STOP

    def __enter__(self) -> "StopRequest":
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
        if self.file and kind is None:  # after a failure, it keeps the launcher from restarting
            with contextlib.suppress(OSError):
                self.file.unlink()

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT:
            if self.interrupted or not self.has_stepped:
                raise KeyboardInterrupt  # the user does not want to wait, or there is nothing to save
            self.interrupted = True
        if not self.reason:
            self.reason = signal.Signals(number).name
            if self.announces:
                print(
                    f"\n{self.reason}: stopping after this step, with a checkpoint, or before the first",
                    file=sys.stderr,
                    flush=True,
                )

    def hear(self, record: dict) -> None:
        """Passes a record of the metrics on to the caller. Rank 0 calls it."""
        if self.on_record and self.on_record(record):
            self.reason = self.reason or "on_record"

    def look(self) -> bool:
        """Returns whether this rank has been asked to stop."""
        if self.file and not self.reason and time.monotonic() >= self.next_look:
            self.reason = _why(self.file)
            self.next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
        return bool(self.reason)

    def agreed(self, world: World) -> bool:
        """Returns whether any rank has been asked to stop. All ranks call it."""
        asked = torch.tensor(float(self.look()), dtype=torch.float64, device=world.device)
        return bool(world.all_reduce_sum(asked) > 0)


def _why(file: Path) -> str:
    """Returns the first 80 characters of a STOP file, or "" if there is none."""
    try:
        return " ".join(file.read_text(errors="replace").split())[:80] or "STOP file"
    except (PermissionError, IsADirectoryError):
        return "STOP file"
    except OSError:  # there is no file, or the storage fails for a moment
        return ""
