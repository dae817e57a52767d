"""Files on storage that fails for a moment, and that anyone may have written.

What fails as a file server restarts is tried again for a minute. Small files are the old one or the new one, whatever
happens in between. Whatever is wrong with what a file says is a ValueError, no other exception. Files of our own say
which format and version they are, and those that this program can't read are refused.
"""

import contextlib
import datetime
import errno
import json
import os
import re
import reprlib
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, NewType, TypeVar, get_args, get_origin

from mamba_fsdp.errors import StorageError, UserError
from mamba_fsdp.heartbeat import heart

T = TypeVar("T")
SECONDS_OF_TRYING = 60.0
LONGEST_PAUSE = 5.0  # seconds between attempts
NAMES = (
    "EIO ESTALE ETIMEDOUT ENOTCONN ECONNRESET ECONNABORTED EHOSTDOWN EHOSTUNREACH ENETDOWN "
    "ENETUNREACH EREMOTEIO ENOLINK ESHUTDOWN EAGAIN EINTR"
)
# Numbers of errors; not every system knows all names.
MAY_PASS = {getattr(errno, name, errno.EIO) for name in NAMES.split()}
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # ELOOP: links that lead in a circle


def retry_io(action: Callable[[], T], what: str | Path) -> T:
    """What `action()` returns; called again while it raises an OSError that may pass, so it must begin anew each time.

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
            heart.beat()
            time.sleep(min(pause, LONGEST_PAUSE, SECONDS_OF_TRYING))
            pause *= 2
        else:
            if began is not None:
                _print_line(f"{what}: works again after {time.monotonic() - began:.1f} s")
            return result


def storage_error(error: OSError, text: str) -> UserError:
    """Returns an error with this text for one of the disk's: a StorageError if a later start may find it well."""
    kind = StorageError if error.errno in MAY_PASS else UserError
    return kind(text)


def this_rank() -> str:
    """Returns what messages call this process."""
    return f"rank {os.environ.get('RANK', 0)} on {socket.gethostname()}"


def _print_line(text: str) -> None:
    rank = f"{this_rank()}: " if "RANK" in os.environ else ""
    with contextlib.suppress(OSError):  # a terminal may be gone too
        print(rank + text, file=sys.stderr, flush=True)


def exists(path: str | Path) -> bool:
    """Whether there is such a file or folder. For Path.exists of Python 3.14 storage that fails is a no."""
    try:
        retry_io(partial(os.stat, path), path)
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        return False
    return True


# Writing


def sync_folder(folder: str | Path) -> None:
    """Flushes a folder's entries, so that a rename in it survives a power cut, where the file system can do that."""
    with contextlib.suppress(OSError):  # some network file systems refuse fsync on a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def hidden_beside(path: Path) -> Path:
    """A new name beside `path`, for what is not yet whole or no longer: .<name>.<unique>.partial."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")


def list_hidden_beside(path: Path) -> list[Path]:
    """Returns what lies beside `path` under names that hidden_beside gives. Raises OSError."""
    wanted = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{12}\.partial")
    return [path.with_name(name) for name in os.listdir(path.parent) if wanted.fullmatch(name)]


def size_of(folder: Path) -> int:
    """Returns the bytes of the files in a folder, which may be vanishing."""
    total = 0
    for path in _files_in(folder):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def delete(folder: Path) -> None:
    """Removes a folder, which may be vanishing, as far as the disk allows. Of a link only the link goes."""
    if folder.is_symlink():
        folder.unlink()
        return
    for path in _files_in(folder):
        with contextlib.suppress(OSError):
            path.unlink()
        heart.beat()
    shutil.rmtree(folder, ignore_errors=True)


def _files_in(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):  # which skips a folder that is gone by then
        for name in names:
            yield Path(parent, name)


def write_atomically(path: str | Path, data: str, own: Path | None = None) -> None:
    """Readers of `path` see the old content or all of `data`. Raises StorageError after patient trying, and OSError.

    own: the folder in which the data lies until it is whole, see lease.py; otherwise it lies beside `path`.
    """
    final = Path(path)

    def attempt() -> None:
        temporary = (own or final.parent) / f".{final.name}.{uuid.uuid4().hex}.tmp"
        try:
            with open(temporary, "xb") as file:
                file.write(data.encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, final)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(final.parent)

    retry_io(attempt, path)


def write_object(path: Path, content: dict) -> None:
    """Writes JSON, which read_object reads, as write_atomically does."""
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def write_for_user(path: str | Path, data: str, own: Path | None = None) -> None:
    """As write_atomically, but raises UserError where the path can't be written."""
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
            if not new.exists():  # else an attempt that was told to have failed was made
                raise

    retry_io(rename, new)


# Reading what anyone may have written

FileName = NewType("FileName", str)  # of a file in the same folder
KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    FileName: "the name of a file in this folder",
    list: "a list",
    dict: "an object",
}


def at_least(least: int) -> Any:
    """Returns a field of a dataclass for whole numbers from `least` on; those of other fields begin at 0."""
    return field(metadata={"least": least})


def from_json(kind: Callable[..., T], value: Any, name: str = "the content", least: int = 0) -> T:
    """Returns `value`, which JSON gave, once it is found to be of this kind.

    kind: int, float, str, bool, FileName, Any; `X | None`, list[X] or dict[str, X] of another kind X; or a dataclass with
    fields of these kinds. An object becomes such a dataclass if it lacks no field without a default, and has no other
    fields, which are passed over where the class has HAS_OTHER_FIELDS. Raises ValueError, whose message begins with
    `name` or with that of the field.
    """
    if kind is Any:
        return value
    basis = get_origin(kind) or kind
    arguments = get_args(kind)
    if basis is UnionType:
        if value is not None:
            value = from_json(arguments[0], value, name)
    elif is_dataclass(kind):
        value = kind(**_values_of_fields(kind, value, name))
    elif not _is_of_kind(value, basis, least):
        bound = f" from {least} on" if basis is int else ""
        raise ValueError(f"{name} is {reprlib.repr(value)}, not {KINDS[basis]}{bound}")
    elif basis is list:
        value = [from_json(arguments[0], item, f"an item of {name}") for item in value]
    elif basis is dict:
        value = {
            from_json(arguments[0], key, f"a name in {name}"): from_json(
                arguments[1], item, repr(key[:60])
            )
            for key, item in value.items()
        }
    return value


def _is_of_kind(value: Any, basis: Any, least: int) -> bool:
    if basis is FileName:
        is_short = type(value) is str and 0 < len(value) < 256
        return is_short and "/" not in value and "\0" not in value and value not in (".", "..")
    if type(value) is int:
        return basis in (int, float) and least <= value < 1 << 63
    return type(value) is basis


def _values_of_fields(kind: Any, value: Any, name: str) -> dict[str, Any]:
    """Returns the checked values of a dataclass's fields from an object."""
    content = from_json(dict[str, Any], value, name)
    values = {}
    for described in fields(kind):
        if described.name in content:
            least = described.metadata.get("least", 0)
            item = content.pop(described.name)
            field_kind: Any = described.type
            values[described.name] = from_json(field_kind, item, described.name, least)
        elif described.default is MISSING and described.default_factory is MISSING:
            raise ValueError(f"{name} lacks {described.name}")
    if content and not hasattr(kind, "HAS_OTHER_FIELDS"):
        raise ValueError(f"{name} has an unknown field {min(content)[:60]!r}")
    return values


def parse_object(text: str | bytes | bytearray) -> dict[str, Any]:
    """Returns the JSON object that `text` is. Raises ValueError."""
    try:
        return from_json(dict[str, Any], json.loads(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_object(path: Path, kind: Any, remedy: str, file_format: "Format | None" = None) -> Any:
    """Returns the JSON object in a file as a `kind`, see from_json. Raises UserError, which ends in `remedy`, where it is
    none or of another format, StorageError after patient trying, and FileNotFoundError."""
    try:
        content = parse_object(retry_io(path.read_bytes, path))
        if file_format:
            content = file_format.body(path, content)
        return from_json(kind, content)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: can't be read ({reason}); {remedy}") from None


# What our own files say of themselves


def timestamp() -> str:
    """The moment, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Format:
    """A kind of file that this program writes."""

    name: str
    version: int  # raised whenever the program before the change would misread a file

    def header(self) -> dict[str, str | int]:
        """The fields that a file of this format begins with."""
        return {"format": self.name, "version": self.version}

    def reads(self, content: dict) -> bool:
        """Returns whether a file with this `content` is of this format and of the version that this program reads."""
        return self.header().items() <= content.items()

    def body(self, path: Path, content: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of the file `path` that follow the header. Raises UserError unless this program reads it."""
        if not self.reads(content):
            raise UserError(
                f"{path}: {content.get('format')!r} of version {content.get('version')}; this version of the program "
                f"reads {self.name!r} of version {self.version} here"
            )
        return {name: value for name, value in content.items() if name not in self.header()}


CHECKPOINT = Format("mamba_fsdp checkpoint", 1)
TOKEN_STORE = Format("mamba_fsdp token store", 1)
DATASET = Format("mamba_fsdp dataset", 1)
