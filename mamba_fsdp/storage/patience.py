"""Reads and writes files on unreliable storage: retries transient errors for a minute, as when a file server restarts,
and replaces a small file whole or not at all."""

import contextlib
import errno
import os
import re
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from mamba_fsdp.errors import StorageError, UserError, first_line
from mamba_fsdp.text import format_quantity
from mamba_fsdp.this_process import progress, rank_and_host

T = TypeVar("T")
SECONDS_OF_TRYING = 60.0
LONGEST_PAUSE = 5.0  # seconds between attempts
NAMES = (
    "EIO ESTALE ETIMEDOUT ENOTCONN ECONNRESET ECONNABORTED EHOSTDOWN EHOSTUNREACH ENETDOWN "
    "ENETUNREACH EREMOTEIO ENOLINK ESHUTDOWN EAGAIN EINTR"
)
# Numbers of transient errors; not every system knows all names.
MAY_PASS = {getattr(errno, name, errno.EIO) for name in NAMES.split()}
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # ELOOP: links that lead in a circle
MOST_READ = 1 << 30  # bytes of a file that is read as a whole


def retry_io(action: Callable[[], T], what: str | Path) -> T:
    """Returns what `action()` returns; calls it again after a transient OSError, so it must be repeatable.

    what: the file or folder, for the log. Raises StorageError after SECONDS_OF_TRYING, and other OSErrors at once.
    """
    began = None
    pause = 0.1
    while True:
        try:
            result = action()
        except OSError as error:
            if error.errno not in MAY_PASS:
                raise
            if began is None:
                began = time.monotonic()
                _print_line(f"warning: {what}: {error.strerror}; trying again for a minute")
            if time.monotonic() - began >= SECONDS_OF_TRYING:
                raise StorageError(
                    f"{what}: {error.strerror}, even after a minute of retries; the same command "
                    "resumes once the storage answers"
                ) from error
            progress.touch()
            time.sleep(min(pause, LONGEST_PAUSE, SECONDS_OF_TRYING))
            pause *= 2
        else:
            if began is not None:
                _print_line(f"{what}: works again after {time.monotonic() - began:.1f} s")
            return result


def as_os_error(error: RuntimeError) -> OSError | None:
    """Returns the error of the operating system that torch reports as a RuntimeError, such as "unable to mmap 8 bytes:
    Interrupted system call (4)"; None for any other error."""
    match = re.search(r": ([^:]+) \((\d+)\)$", first_line(error))
    return OSError(int(match[2]), match[1]) if match else None


def storage_error(error: OSError, text: str) -> UserError:
    """Returns an error with this text for an error of the disk: a StorageError if a later start may succeed."""
    kind = StorageError if error.errno in MAY_PASS else UserError
    return kind(text)


def _print_line(text: str) -> None:
    rank = f"{rank_and_host()}: " if "RANK" in os.environ else ""
    with contextlib.suppress(OSError):  # a terminal may be gone too
        print(rank + text, file=sys.stderr, flush=True)


def exists(path: str | Path) -> bool:
    """Returns whether there is such a file or folder. Path.exists of Python 3.14 says no if the storage fails."""
    return _mode(path) != 0


def is_file(path: str | Path) -> bool:
    """Returns whether there is such a file; links are followed."""
    return stat.S_ISREG(_mode(path))


def is_folder(path: str | Path) -> bool:
    """Returns whether there is such a folder; links are followed."""
    return stat.S_ISDIR(_mode(path))


def stat_of(path: str | Path) -> os.stat_result:
    """Returns what os.stat does. Raises StorageError after a minute of retries, and other OSErrors at once."""
    return retry_io(partial(os.stat, path), path)


def _mode(path: str | Path) -> int:
    """Returns the type and the permissions of a file or folder; 0 if there is none."""
    try:
        return stat_of(path).st_mode
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        return 0


def names_in(folder: str | Path) -> list[str]:
    """Returns the names in a folder; none if there is no such folder. A glob would take an error for an empty folder."""
    try:
        return retry_io(partial(os.listdir, folder), folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def open_to_read(path: str | Path, flags: int = 0) -> BinaryIO:
    """Opens a file that another program may have written. Raises OSError, also for a pipe or a device: opening or
    reading those could block forever. flags: further flags for os.open."""

    def opener(name: str, mode: int) -> int:
        descriptor = os.open(name, mode | flags | os.O_NONBLOCK)
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # Python refuses folders itself
            os.close(descriptor)
            raise OSError(errno.EACCES, f"{Path(name).name} is not a regular file", name)
        return descriptor

    return open(path, "rb", opener=opener)


def read_once(path: str | Path, most: int = MOST_READ, flags: int = 0) -> tuple[bytes, int]:
    """Returns (the content of a file, its time of modification in ns). Raises OSError, also if the file has more than
    `most` bytes. flags: see open_to_read."""
    with open_to_read(path, flags) as file:
        found = os.fstat(file.fileno())
        if found.st_size > most:
            reason = f"{Path(path).name} has more than {format_quantity(most, 'B')}"
            raise OSError(errno.EACCES, reason, str(path))
        return file.read(), found.st_mtime_ns


def read_bytes(path: str | Path, most: int = MOST_READ) -> bytes:
    """Returns the content of a file. Raises StorageError after a minute of retries, and OSError as `read_once` does."""
    content, _ = retry_io(partial(read_once, path, most), path)
    return content


def read_text(path: str | Path) -> str:
    """Returns the content of a UTF-8 file. Raises as `read_bytes` does, and UnicodeDecodeError."""
    return read_bytes(path).decode()


# Writing


def make_folder(path: Path, parents: bool = False) -> None:
    """Makes a folder, unless it exists. Raises as write_durably does. parents: also makes the folders above it."""
    retry_io(partial(path.mkdir, parents=parents, exist_ok=True), path)


def write_durably(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Makes a file, or replaces an earlier one, and returns when it is on the disk. Raises StorageError after a minute of
    retries, and other OSErrors at once.

    write: writes the content to an open file. After a transient error it is called again with an empty file, because a
    failed flush may have lost any part of the data.
    """

    def attempt() -> None:
        with open(path, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())

    retry_io(attempt, path)


def copy_file(source: Path, target: Path) -> None:
    """Copies the content of a file. Raises as write_durably does."""

    def write(file: BinaryIO) -> None:
        with open_to_read(source) as original:
            shutil.copyfileobj(original, file)

    write_durably(target, write)


def sync_folder(folder: str | Path) -> None:
    """Flushes a folder's entries, so that a rename in it survives a power cut, if the file system can do that."""
    with contextlib.suppress(OSError):  # some network file systems refuse fsync on a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def hidden_beside(path: Path) -> Path:
    """Returns a new name next to `path`, for what is not yet or no longer whole: .<name>.<unique>.partial."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")


def list_hidden_beside(path: Path) -> list[Path]:
    """Returns what lies next to `path` under names that hidden_beside gives."""
    wanted = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{12}\.partial")
    return [path.with_name(name) for name in names_in(path.parent) if wanted.fullmatch(name)]


def size_of(path: Path) -> int:
    """Returns the bytes of a file, or of the files in a folder, which may disappear meanwhile. Raises StorageError."""
    return retry_io(partial(_size, path), path)


def _size(path: Path) -> int:
    with _only_what_may_pass():
        if _is_own_folder(path):
            return sum(_size(path / name) for name in os.listdir(path))
        return os.stat(path).st_size
    return 0


def delete(path: Path) -> None:
    """Removes a file or a folder as far as the disk allows; parts may disappear meanwhile. Links are not followed."""
    with contextlib.suppress(StorageError):
        retry_io(partial(_remove, path), path)


def _remove(path: Path) -> None:
    with _only_what_may_pass():
        if _is_own_folder(path):
            for name in os.listdir(path):
                _remove(path / name)
            os.rmdir(path)
        else:
            os.unlink(path)
    progress.touch()


def _is_own_folder(path: Path) -> bool:
    """Returns whether this is a folder and not a link to one. Raises OSError."""
    return stat.S_ISDIR(os.lstat(path).st_mode)


@contextlib.contextmanager
def _only_what_may_pass() -> Iterator[None]:
    """Suppresses an OSError inside, unless it is transient."""
    try:
        yield
    except OSError as error:
        if error.errno in MAY_PASS:
            raise


def write_atomically(path: str | Path, data: str | bytes, own: Path | None = None) -> None:
    """Writes a file; its readers see the old content or all of `data`. Raises StorageError after a minute of retries, and
    other OSErrors at once.

    own: the folder in which the data lies until it is whole, see run/lease.py; otherwise it lies next to `path`.
    """
    final = Path(path)
    content = data.encode() if isinstance(data, str) else data

    def attempt() -> None:
        temporary = (own or final.parent) / f".{final.name}.{uuid.uuid4().hex}.tmp"
        try:
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, final)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(final.parent)

    retry_io(attempt, path)


def write_for_user(path: str | Path, data: str | bytes, own: Path | None = None) -> None:
    """Writes as write_atomically does, but raises UserError if the path can't be written."""
    try:
        write_atomically(path, data, own)
    except OSError as error:
        raise UserError(f"{path}: can't be written ({error.strerror})") from None


def move(old: Path, new: Path) -> None:
    """Renames to a name that is free. Raises as write_atomically does."""

    def rename() -> None:
        try:
            old.rename(new)
        except FileNotFoundError:
            if not new.exists():  # otherwise an attempt that reported an error has succeeded
                raise

    retry_io(rename, new)
