"""Handles a node's signals in a thread next to torchrun's agent, which gets none of them.

By itself the agent would kill the ranks 30 s after a request to stop, even in the middle of a
checkpoint; and when one rank fails, the others may wait just as long for it.
"""

import contextlib
import os
import shutil
import signal
import threading
from pathlib import Path

REQUESTS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}  # to stop
WATCHED = REQUESTS | {signal.SIGQUIT, signal.SIGCHLD}  # SIGQUIT: the user does not want to wait
FAILED = (os.CLD_KILLED, os.CLD_DUMPED)


class Watcher(threading.Thread):
    """Passes the first request to stop on to the ranks, and kills the other ranks if one fails.

    WATCHED must be blocked in all threads. request: the signal that asked to stop, or 0. killed: the
    process ids of ranks that this thread killed because another one failed.
    """

    def __init__(self, scratch: str) -> None:
        """Makes the thread. scratch: the folder to remove if the process exits without ranks."""
        super().__init__(daemon=True)
        self.scratch = scratch
        self.request = 0
        self.killed: set[int] = set()

    def run(self) -> None:
        while True:
            event = signal.sigwaitinfo(WATCHED)
            if event.si_signo == signal.SIGCHLD:
                has_failed = event.si_code in FAILED or (
                    event.si_code == os.CLD_EXITED and event.si_status
                )
                if has_failed and not self.killed:  # otherwise this thread has killed it
                    self.killed = send(signal.SIGKILL) - {event.si_pid}
            elif not child_pids():  # none yet, or none any more
                first = self.request or event.si_signo
                shutil.rmtree(self.scratch, ignore_errors=True)
                os._exit(128 + first)
            elif event.si_signo == signal.SIGQUIT:
                self.request = event.si_signo
                send(signal.SIGKILL)
            elif not self.request:
                self.request = event.si_signo
                send(event.si_signo)


def child_pids() -> set[int]:
    """Returns the process ids of the ranks: they are all that the main thread starts."""
    pid = os.getpid()
    children = Path(f"/proc/{pid}/task/{pid}/children")
    # Twice: the kernel may leave one out while another one goes.
    words = children.read_text().split() + children.read_text().split()
    return set(map(int, words))


def send(number: int) -> set[int]:
    """Sends a signal to the ranks and to what they have started. Returns the ranks' process ids."""
    pids = child_pids()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
    return pids
