"""Reads and writes files on unreliable storage. Transient errors, for example while a file server restarts, are retried for
a minute. Small files are replaced atomically."""

import contextlib
import errno
import io
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
from typing import Any, BinaryIO, TypeVar

from mamba_fsdp.errors import StorageError, UserError, first_line
from mamba_fsdp.text import format_quantity
from mamba_fsdp.this_process import progress, rank_and_host

T = TypeVar("T")
RETRY_SECONDS = 60.0
MAX_PAUSE = 5.0  # seconds between attempts
NAMES = (
    "EIO ESTALE ETIMEDOUT ENOTCONN ECONNRESET ECONNABORTED EHOSTDOWN EHOSTUNREACH ENETDOWN "
    "ENETUNREACH EREMOTEIO ENOLINK ESHUTDOWN EAGAIN EINTR"
)
# The error numbers of transient errors. For a name that this system does not define, the set contains EIO.
TRANSIENT_ERRNOS = {getattr(errno, name, errno.EIO) for name in NAMES.split()}
MISSING_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # ELOOP: links that form a cycle
MAX_READ = 1 << 30  # the maximal size in bytes of a file to read as a whole


def retry_io(action: Callable[..., T], what: str | Path, *inputs: Any) -> T:
    """Calls `action(*inputs)` and returns its result. After a transient OSError the action is called again, so it
    must be repeatable.

    what: the file or folder, for messages. Raises StorageError if transient errors last longer than RETRY_SECONDS. Other
    OSErrors are raised immediately.
    """
    began = None
    pause = 0.1
    while True:
        try:
            result = action(*inputs)
        except OSError as error:
            if error.errno not in TRANSIENT_ERRNOS:
                raise
            if began is None:
                began = time.monotonic()
                _print_line(f"warning: {what}: {error.strerror}; trying again for a minute")
            if time.monotonic() - began >= RETRY_SECONDS:
                raise StorageError(
                    f"{what}: {error.strerror}, even after a minute of retries; the same command "
                    "resumes once the storage answers"
                ) from error
            progress.touch()
            time.sleep(min(pause, MAX_PAUSE, RETRY_SECONDS))
            pause *= 2
        else:
            if began is not None:
                _print_line(f"{what}: works again after {time.monotonic() - began:.1f} s")
            return result


def parse_os_error(error: Exception) -> OSError | None:
    """Converts an exception of torch or of a library in Rust with the text of a system error, such as "unable to mmap 8 bytes:
    Interrupted system call (4)" or "No space left on device (os error 28)", to an OSError. Returns None for any other
    error."""
    match = re.search(r"(?:: [^:]+ \(|\(os error )(\d+)\)$", first_line(error))
    return OSError(int(match[1]), os.strerror(int(match[1]))) if match else None


def storage_error(error: OSError, text: str) -> UserError:
    """Returns an exception with this text for a failed file operation: a StorageError if `error` is transient, because a
    later start can then succeed, otherwise a UserError."""
    kind = StorageError if error.errno in TRANSIENT_ERRNOS else UserError
    return kind(text)


def _print_line(text: str) -> None:
    rank = f"{rank_and_host()}: " if "RANK" in os.environ else ""
    with contextlib.suppress(OSError):  # stderr can be closed
        print(rank + text, file=sys.stderr, flush=True)


def exists(path: str | Path) -> bool:
    """Returns whether a file or folder exists. Unlike this function, Path.exists of Python 3.14 returns False if the storage
    fails."""
    return _mode(path) != 0


def is_file(path: str | Path) -> bool:
    """Returns whether the path is a file, or a link to one."""
    return stat.S_ISREG(_mode(path))


def is_folder(path: str | Path) -> bool:
    """Returns whether the path is a folder, or a link to one."""
    return stat.S_ISDIR(_mode(path))


def stat_of(path: str | Path) -> os.stat_result:
    """Calls os.stat, with retries. Raises StorageError after a minute of retries, and other OSErrors immediately."""
    return retry_io(os.stat, path, path)


def _mode(path: str | Path) -> int:
    """Returns the mode of a file or folder (type and permissions), or 0 if it does not exist."""
    try:
        return stat_of(path).st_mode
    except OSError as error:
        if error.errno not in MISSING_ERRNOS:
            raise
        return 0


def list_names(folder: str | Path) -> list[str]:
    """Returns the names in a folder, or an empty list if the folder does not exist. Path.glob is not used, because it
    ignores errors of the storage."""
    try:
        return retry_io(os.listdir, folder, folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def list_entries(folder: str | Path) -> dict[str, bool]:
    """Returns {name: whether it is a folder or a link to one} for a folder, without a call to the file server for each file.
    Raises StorageError after a minute of retries, and other OSErrors immediately."""

    def attempt() -> dict[str, bool]:
        with os.scandir(folder) as entries:
            return {
                entry.name: is_folder(entry.path) if entry.is_symlink() else entry.is_dir()
                for entry in entries
            }

    return retry_io(attempt, folder)


def open_to_read(path: str | Path, flags: int = 0) -> BinaryIO:
    """Opens an untrusted file for reading.

    flags: further flags for os.open. Raises OSError, also for a pipe or a device, because opening or reading it could block
    forever."""

    return open(path, "rb", opener=partial(_open_regular_file, flags))


def _open_regular_file(flags: int, name: str, mode: int) -> int:
    descriptor = os.open(name, mode | flags | os.O_NONBLOCK)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # open() raises an error for folders
        os.close(descriptor)
        raise OSError(errno.EACCES, f"{Path(name).name} is not a regular file", name)
    return descriptor


def open_with_retries(path: str | Path) -> io.BufferedReader:
    """Opens an untrusted file for reading, like open_to_read, for example a large one that is read for hours. Opening it and
    each read are retried: they raise StorageError after a minute of retries. Raises other OSErrors immediately."""
    opener = partial(_open_regular_file, 0)
    return io.BufferedReader(retry_io(partial(_FileWithRetries, path, opener=opener), path))


class _FileWithRetries(io.FileIO):
    """A file whose reads are retried."""

    # The methods of RawIOBase call readinto.
    read: Any = io.RawIOBase.read
    readall = io.RawIOBase.readall

    def readinto(self, buffer: Any) -> int:
        return retry_io(self._read, str(self.name), buffer)

    def _read(self, buffer: Any) -> int:
        try:
            return os.readv(self.fileno(), [buffer])
        except OSError:
            # A descriptor can stay stale after a restart of the file server, so the next attempt uses a new one.
            with contextlib.suppress(OSError), open_to_read(str(self.name)) as new:
                new.seek(self.tell())
                os.dup2(new.fileno(), self.fileno())
            raise


def read_once(path: str | Path, max_size: int = MAX_READ, flags: int = 0) -> tuple[bytes, int]:
    """Reads a file without retries.

    max_size: in bytes. flags: see open_to_read. Returns (content, time of modification in ns). Raises OSError, also if the
    file is larger than `max_size`."""
    with open_to_read(path, flags) as file:
        found = os.fstat(file.fileno())
        if found.st_size > max_size:
            reason = f"{Path(path).name} has more than {format_quantity(max_size, 'B')}"
            raise OSError(errno.EACCES, reason, str(path))
        return file.read(), found.st_mtime_ns


def read_bytes(path: str | Path) -> bytes:
    """Returns the content of a file of at most MAX_READ bytes. Raises StorageError after a minute of retries. Raises other
    OSErrors immediately, also if the file is larger, a pipe or a device."""
    content, _ = retry_io(read_once, path, path)
    return content


def read_text(path: str | Path) -> str:
    """Returns the content of a UTF-8 file. Raises UnicodeDecodeError, StorageError after a minute of retries, and other
    OSErrors immediately."""
    return read_bytes(path).decode()


# Writing


def make_folder(path: Path, parents: bool = False) -> None:
    """Makes a folder unless it exists.

    parents: also make missing parent folders. Raises StorageError after a minute of retries, and other OSErrors immediately."""
    retry_io(partial(path.mkdir, parents=parents, exist_ok=True), path)


def write_durably(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes or overwrites a file, and returns when the content is on the disk.

    write: writes the content to an open file. After a transient error it is called again with an empty file, because a
    failed flush can have lost any part of the data. Raises StorageError after a minute of retries, and other OSErrors
    immediately.
    """

    retry_io(lambda: _write_once(open(path, "wb"), write), path)


def _write_once(file: BinaryIO, write: Callable[[BinaryIO], object]) -> None:
    """Writes to an open file, closes it, and returns when the content is on the disk."""
    with file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def write_part(path: Path, start: int, content: bytes | bytearray, is_last: bool) -> None:
    """Writes `content` into a file from byte `start` on, and returns when `content` is on the disk. Creates the file if it
    does not exist.

    is_last: whether to remove everything in the file after `content`. Raises StorageError after a minute of retries, and other OSErrors immediately."""

    def write(file: BinaryIO) -> None:
        file.seek(start)
        file.write(content)
        if is_last:
            file.truncate()

    def attempt() -> None:
        # The built-in open() would truncate the file.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        _write_once(open(descriptor, "wb"), write)

    retry_io(attempt, path)


def copy_file(source: Path, target: Path) -> None:
    """Copies the content of a file, and returns when the copy is on the disk. Raises StorageError after a minute of retries,
    and other OSErrors immediately."""

    def write(file: BinaryIO) -> None:
        with open_to_read(source) as original:
            shutil.copyfileobj(original, file)

    write_durably(target, write)


def sync_folder(folder: str | Path) -> None:
    """Flushes the entries of a folder to the disk, so that a rename in it survives a power failure. Ignores errors, because
    some file systems do not support this."""
    with contextlib.suppress(OSError):  # some network file systems do not support fsync on folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def temporary_path(path: Path) -> Path:
    """Returns a new path next to `path` for incomplete content, which is still being written or being removed:
    .<name>.<unique>.partial."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")


def list_temporary_paths(path: Path) -> list[Path]:
    """Lists the files and folders next to `path` that have names from temporary_path."""
    wanted = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{12}\.partial")
    return [path.with_name(name) for name in list_names(path.parent) if wanted.fullmatch(name)]


def size_of(path: Path) -> int:
    """Returns the size in bytes of a file, or of all files in a folder. Files that disappear meanwhile, or that can't be
    read, are not counted. Raises StorageError after a minute of retries."""
    return retry_io(_size, path, path)


def _size(path: Path) -> int:
    with _ignore_permanent_errors():
        if _is_own_folder(path):
            return sum(_size(path / name) for name in os.listdir(path))
        return os.stat(path).st_size
    return 0


def delete(path: Path) -> None:
    """Removes a file or a folder, and ignores errors. Links are removed but not followed. Other processes can remove parts of
    the folder at the same time."""
    with contextlib.suppress(StorageError):
        retry_io(_remove, path, path)


def _remove(path: Path) -> None:
    with _ignore_permanent_errors():
        if _is_own_folder(path):
            for name in os.listdir(path):
                _remove(path / name)
            os.rmdir(path)
        else:
            os.unlink(path)
    progress.touch()


def _is_own_folder(path: Path) -> bool:
    """Returns whether the path is a folder and not a link to one. Raises OSError."""
    return stat.S_ISDIR(os.lstat(path).st_mode)


@contextlib.contextmanager
def _ignore_permanent_errors() -> Iterator[None]:
    """Suppresses OSErrors in the block, except for transient errors."""
    try:
        yield
    except OSError as error:
        if error.errno in TRANSIENT_ERRNOS:
            raise


def write_atomically(path: str | Path, data: str | bytes, own: Path | None = None) -> None:
    """Replaces a file atomically: readers see either the old content or all of `data`.

    own: the folder for the temporary file, see run/lease.py; by default it is the folder of `path`. Raises StorageError after
    a minute of retries, and other OSErrors immediately.
    """
    final = Path(path)
    content = data.encode() if isinstance(data, str) else data

    def attempt() -> None:
        temporary = (own or final.parent) / f".{final.name}.{uuid.uuid4().hex}.tmp"
        try:
            _write_once(open(temporary, "xb"), lambda file: file.write(content))
            os.replace(temporary, final)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(final.parent)

    retry_io(attempt, path)


def write_for_user(path: str | Path, data: str | bytes, own: Path | None = None) -> None:
    """Replaces a file atomically, like write_atomically, with the same parameters. Raises UserError if the path can't be
    written, and StorageError after a minute of retries."""
    try:
        write_atomically(path, data, own)
    except OSError as error:
        raise UserError(
            f"{path}: can't be written ({error.strerror}); choose another path, or make this one writable"
        ) from None


def move(old: Path, new: Path) -> None:
    """Renames a file or folder to a name that does not exist yet. Raises StorageError after a minute of retries, and other
    OSErrors immediately."""

    def rename() -> None:
        try:
            old.rename(new)
        except FileNotFoundError:
            # If the new name exists, an earlier attempt has succeeded although it reported an error.
            if not new.exists():
                raise

    retry_io(rename, new)
