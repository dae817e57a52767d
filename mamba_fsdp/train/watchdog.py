"""A rank that makes no progress prints its stacks and ends the job, instead of hanging until the time limit."""

import faulthandler
import os
import sys
import threading
import time

from mamba_fsdp.errors import UserError, leave_for_torchrun
from mamba_fsdp.heartbeat import heart


class Watchdog:
    """When `heart` has not beaten for `minutes`, prints the stacks of all threads to stderr and exits with 1."""

    def __init__(self, minutes: float, rank: int) -> None:
        self.seconds, self.rank = minutes * 60, rank
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        heart.beat()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join()

    def _watch(self):
        while not self.stopped.wait(min(1.0, self.seconds / 4)):
            if time.monotonic() - heart.last > self.seconds:
                wrong = (f"rank {self.rank} made no progress for {self.seconds / 60:g} minutes (timeout_minutes). "
                         "Either it is stuck, or it waits for a rank that is")
                print(f"\nerror: {wrong}. Its threads stand at:", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(all_threads=True)
                leave_for_torchrun(UserError(f"{wrong}; where its threads stood is above"))
                os._exit(1)
