"""Describes this process to others: its name in messages, its progress for the watchdog, and the error that it
leaves for torchrun."""

import json
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from mamba_fsdp.errors import UserError


class Progress:
    """Records the progress of this process, so that the watchdog can distinguish long work from a process that is
    stuck.

    count: how often this process has made progress. last: the time.monotonic() of the last progress of this process, or
    of a rank that it waits for. on_stall: a function that the watchdog calls before it ends the process.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last = time.monotonic()
        self.on_stall: Callable[[], None] | None = None

    def touch(self) -> None:
        """Records that this process has made progress."""
        self.count += 1
        self.touch_for_peer()

    def touch_for_peer(self) -> None:
        """Records that a rank which this process waits for has made progress."""
        self.last = time.monotonic()


progress = Progress()  # shared by all threads of this process


def rank_and_host() -> str:
    """Returns the name of this process in messages, for example "rank 3 on node-1"."""
    return f"rank {os.environ.get('RANK', 0)} on {socket.gethostname()}"


def write_torchrun_error(error: BaseException) -> None:
    """Writes the exception to torchrun's error file, if torchrun started this process.

    The launcher prints the error at the end of the log.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    exit_code = 1
    text = "".join(traceback.format_exception(error))
    if isinstance(error, UserError):
        exit_code = error.exit_code
        text = f"error: {error}\n"
    details = {
        "py_callstack": text,
        "timestamp": str(int(time.time())),
        "exit_code": str(exit_code),
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
    Path(path).write_text(json.dumps({"message": message}))
