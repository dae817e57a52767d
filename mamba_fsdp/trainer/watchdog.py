"""Ends a rank that makes no progress, after printing its stacks, so that the job does not hang until its time limit."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator

from mamba_fsdp.errors import UserError
from mamba_fsdp.this_process import progress, write_torchrun_error


@contextlib.contextmanager
def watchdog(minutes: float, rank: int) -> Iterator[None]:
    """Ends the process with exit code 1 if it makes no progress for `minutes` inside the block.

    Before this, the stacks of all threads are printed to stderr. The work reports its progress with
    `Progress.touch`.
    """
    ended = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(minutes, rank, ended), name="watchdog", daemon=True
    )
    progress.touch()
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(minutes: float, rank: int, ended: threading.Event) -> None:
    interval = min(1.0, minutes * 15)
    looked = time.monotonic()
    while not ended.wait(interval):
        if time.monotonic() - looked > 5 * interval:
            # This process was suspended, for example by Ctrl-Z. Its work was suspended as well, so it is not stuck.
            progress.touch_for_peer()
        looked = time.monotonic()
        if looked - progress.last > minutes * 60:
            _end_process(minutes, rank)


def _end_process(minutes: float, rank: int) -> None:
    wrong = (
        f"rank {rank} made no progress for {minutes:g} minutes (timeout_minutes). "
        "Either it is stuck, or it waits for a rank that is stuck"
    )
    print(f"\nerror: {wrong}. The stacks of its threads:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    with contextlib.suppress(OSError):
        if progress.on_stall:
            progress.on_stall()
    write_torchrun_error(UserError(f"{wrong}; the stacks of its threads are printed above"))
    os._exit(1)
