"""Storage that fails for a moment: a file server restarts, a link is lost. What failed is tried again for a minute."""

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mamba_fsdp.errors import StorageError
from mamba_fsdp.heartbeat import heart

T = TypeVar("T")
SECONDS_OF_TRYING = 60.0
LONGEST_PAUSE = 5.0  # seconds between attempts
MAY_PASS = {getattr(errno, name, None) for name in (
    "EIO", "ESTALE", "ETIMEDOUT", "ENOTCONN", "ECONNRESET", "ECONNABORTED", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN",
    "ENETUNREACH", "EREMOTEIO", "ENOLINK", "ESHUTDOWN", "EAGAIN", "EINTR")} - {None}


def patiently(action: Callable[[], T], what: str | Path) -> T:
    """What `action()` returns; called again while it raises an OSError that may pass, so it must begin anew each time.

    what: the file or folder, for the log. Raises StorageError after SECONDS_OF_TRYING, and other OSErrors at once.
    """
    began = pause = 0.0
    while True:
        try:
            result = action()
        except OSError as error:
            if error.errno not in MAY_PASS:
                raise
            if not began:
                began = time.monotonic()
                _say(f"warning: {what}: {error.strerror}; trying again for a minute")
            if time.monotonic() - began >= SECONDS_OF_TRYING:
                raise StorageError(f"{what}: {error.strerror}, also after a minute of trying again; the same command "
                                   "resumes once the storage answers") from error
            heart.beat()
            pause = min(2 * pause or 0.1, LONGEST_PAUSE, SECONDS_OF_TRYING)
            time.sleep(pause)
        else:
            if began:
                _say(f"{what}: went well again after {time.monotonic() - began:.1f} s")
            return result


def exists(path: str | Path) -> bool:
    """Whether there is such a file or folder. For Path.exists of Python 3.14 storage that fails is a no."""
    try:
        return bool(patiently(lambda: os.stat(path), path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _say(text):
    rank = f"rank {os.environ['RANK']} on {socket.gethostname()}: " if "RANK" in os.environ else ""
    with contextlib.suppress(OSError):  # a terminal may be gone too
        print(rank + text, file=sys.stderr, flush=True)
