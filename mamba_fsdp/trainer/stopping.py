"""Asking a run to stop: SIGTERM, SIGINT, SIGUSR1, SIGHUP, or a file STOP in the run folder. The
step ends and a checkpoint is committed. Under nohup, SIGHUP (a terminal that closes) is ignored and
training continues. A file that is there before a start says `run FOLDER` was for an earlier one:
who says it, 1.train.sbatch or verbs/train.py, removes it."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import torch

from mamba_fsdp.parallel.world import World
from mamba_fsdp.run_layout import STOP

SECONDS_BETWEEN_LOOKS = 1.0  # at the STOP file: on a shared disk each is a round trip


class StopRequest:
    """Notices requests on this rank; `reason`: "" until there is one. Rank 0 looks for the file and
    its words."""

    def __init__(self, run_folder: Path, on_rank0: bool) -> None:
        self.reason = ""
        self.interrupted = False
        self.has_stepped = False  # the loop says so
        self.next_look = 0.0
        # Under torchrun the launcher says it.
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
        if self.file and kind is None:  # what failed is not to be started again by the launcher
            with contextlib.suppress(OSError):
                self.file.unlink()

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT:
            if self.interrupted or not self.has_stepped:
                raise KeyboardInterrupt  # twice: nobody wants to wait; or there is nothing to save
            self.interrupted = True
        if not self.reason:
            self.reason = signal.Signals(number).name
            if self.announces:
                print(
                    f"\n{self.reason}: stopping after this step, with a checkpoint, or before the first",
                    file=sys.stderr,
                    flush=True,
                )

    def look(self) -> bool:
        """Returns whether a stop has been asked for on this rank."""
        if self.file and not self.reason and time.monotonic() >= self.next_look:
            self.reason = _why(self.file)
            self.next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
        return bool(self.reason)

    def agreed(self, world: World) -> bool:
        """Returns whether a stop has been asked for on any rank. All ranks call it."""
        asked = torch.tensor(float(self.look()), dtype=torch.float64, device=world.device)
        return bool(world.all_reduce_sum(asked) > 0)


def _why(file: Path) -> str:
    """What a STOP file says in a few words, "" where there is none."""
    try:
        return " ".join(file.read_text(errors="replace").split())[:80] or "STOP file"
    except (PermissionError, IsADirectoryError):
        return "STOP file"
    except OSError:  # there is none, or storage that fails for a moment has not shown it yet
        return ""
