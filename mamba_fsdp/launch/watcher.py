"""Handles a node's signals in a thread, so that torchrun's agent does not receive them.

The agent would kill the ranks 30 s after a request to stop, even while they write a checkpoint.
After a rank has failed, the agent would also wait up to 30 s before it kills the other ranks, which
often can't exit by themselves because they wait for the failed rank.
"""

import contextlib
import os
import shutil
import signal
import threading
from pathlib import Path

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}  # requests to stop
# SIGQUIT ends the ranks without a checkpoint.
HANDLED_SIGNALS = STOP_SIGNALS | {signal.SIGQUIT, signal.SIGCHLD}
KILLED_CODES = (os.CLD_KILLED, os.CLD_DUMPED)


class Watcher(threading.Thread):
    """Forwards the first request to stop to the ranks, and kills the other ranks if one fails.

    HANDLED_SIGNALS must be blocked in all threads. request: the signal that requested the stop, or
    0. killed: the process ids of the ranks that this thread killed after another rank had failed.
    """

    def __init__(self, scratch: str) -> None:
        """scratch: a folder to remove if a signal ends the process while it has no ranks."""
        super().__init__(daemon=True)
        self.scratch = scratch
        self.request = 0
        self.killed: set[int] = set()

    def run(self) -> None:
        while True:
            event = signal.sigwaitinfo(HANDLED_SIGNALS)
            if event.si_signo == signal.SIGCHLD:
                has_failed = event.si_code in KILLED_CODES or (
                    event.si_code == os.CLD_EXITED and event.si_status
                )
                # Only the first failure matters; this thread kills the other ranks.
                if has_failed and not self.killed:
                    self.killed = send(signal.SIGKILL) - {event.si_pid}
            elif not child_pids():  # no ranks yet, or they have all ended
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
    """Returns the process ids of the ranks. The main thread starts no other processes."""
    pid = os.getpid()
    children = Path(f"/proc/{pid}/task/{pid}/children")
    # The file is read twice, because the kernel can omit a child while another one exits.
    pids = children.read_text().split() + children.read_text().split()
    return set(map(int, pids))


def send(number: int) -> set[int]:
    """Sends a signal to the ranks and their children. Returns the process ids of the ranks."""
    pids = child_pids()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
    return pids
