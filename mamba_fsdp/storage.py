"""Storage that fails for a moment, as a file server restarts: what failed is tried again for a minute. And small files
that are the old one or the new one, whatever happens in between.
"""

import contextlib
import errno
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mamba_fsdp.errors import StorageError, UserError
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.untrusted import like, parse_object

T = TypeVar("T")
SECONDS_OF_TRYING = 60.0
LONGEST_PAUSE = 5.0  # seconds between attempts
MAY_PASS = {
    getattr(errno, name, None)
    for name in (
        "EIO",
        "ESTALE",
        "ETIMEDOUT",
        "ENOTCONN",
        "ECONNRESET",
        "ECONNABORTED",
        "EHOSTDOWN",
        "EHOSTUNREACH",
        "ENETDOWN",
        "ENETUNREACH",
        "EREMOTEIO",
        "ENOLINK",
        "ESHUTDOWN",
        "EAGAIN",
        "EINTR",
    )
} - {None}


def retry_io(action: Callable[[], T], what: str | Path) -> T:
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
                raise StorageError(
                    f"{what}: {error.strerror}, also after a minute of trying again; the same command "
                    "resumes once the storage answers"
                ) from error
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
        return bool(retry_io(lambda: os.stat(path), path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _say(text):
    rank = f"rank {os.environ['RANK']} on {socket.gethostname()}: " if "RANK" in os.environ else ""
    with contextlib.suppress(OSError):  # a terminal may be gone too
        print(rank + text, file=sys.stderr, flush=True)


def read_object(path: Path, example: dict, remedy: str) -> dict[str, Any]:
    """The JSON object in a file, which is like the example. Raises UserError, which ends in `remedy`, where it is not,
    StorageError after patient trying, and FileNotFoundError."""
    try:
        return like(parse_object(retry_io(path.read_bytes, path)), example)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: can't be read ({getattr(error, 'strerror', None) or error}); {remedy}"
        ) from None


def sync_folder(folder: str | Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut, where the file system can do that."""
    with contextlib.suppress(OSError):  # some network file systems refuse fsync on a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def hidden_beside(path: Path) -> Path:
    """A new name beside `path`, for what is not yet whole or no longer: .<name>.<unique>.partial."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")


def write_atomically(path: str | Path, data: str) -> None:
    """Readers of `path` see the old content or all of `data`. Raises StorageError after patient trying, and OSError."""
    retry_io(lambda: _write(Path(path), data), path)


def write_for_user(path: str | Path, data: str) -> None:
    """As write_atomically, but raises UserError where the path can't be written."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise UserError(f"{path}: can't be written ({error.strerror})") from None


def move(old: Path, new: Path) -> None:
    """Rename retry_io to a name that is free. Raises as write_atomically does."""
    # An attempt that was told to have failed may have been made.
    retry_io(lambda: None if new.exists() and not old.exists() else old.rename(new), new)


def _write(path, data):
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)
