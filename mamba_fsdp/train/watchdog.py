"""A rank that makes no progress prints its stacks and ends the job, instead of hanging until the time limit."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator

from mamba_fsdp.errors import UserError, leave_for_torchrun
from mamba_fsdp.heartbeat import heart


@contextlib.contextmanager
def watchdog(minutes: float, rank: int) -> Iterator[None]:
    """When `heart` has not beaten for `minutes` inside, prints the stacks of all threads to stderr and exits with 1."""
    stopped = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(minutes, rank, stopped), name="watchdog", daemon=True
    )
    heart.beat()
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _watch(minutes, rank, stopped):
    between, looked = min(1.0, minutes * 15), time.monotonic()
    while not stopped.wait(between):
        if (
            time.monotonic() - looked > 5 * between
        ):  # this process was stopped, by Ctrl-Z say, and so was its work
            heart.another_beats()
        looked = time.monotonic()
        if time.monotonic() - heart.last > minutes * 60:
            wrong = (
                f"rank {rank} made no progress for {minutes:g} minutes (timeout_minutes). "
                "Either it is stuck, or it waits for a rank that is"
            )
            print(f"\nerror: {wrong}. Its threads stand at:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
            leave_for_torchrun(UserError(f"{wrong}; where its threads stood is above"))
            os._exit(1)
