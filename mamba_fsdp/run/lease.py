"""Lets one process at a time write something: the one that holds a lease, a file that it renews as long as it lives.

A lease is not a lock of the operating system: on a shared file system the mount options decide whether other hosts see
a lock. A lease that is no longer renewed expires, so that no crash needs a clean-up by hand.

A process may be suspended at any moment, even between a check and the write that the check allows, and continue when
another has taken its lease over. Therefore nothing that the two must not mix is written in place. The holder of a lease
has a folder of its own next to it (.<lease>.<unique>.partial); it writes there, and changes what others read by renaming
into and out of this folder. A process that takes a lease first moves all other own folders into its own: from then on
every such rename of an earlier holder fails. What a killed process left unfinished is in its own folder and is removed
with it.

A run holds its run folder, an export the folder that it makes, and a tokenising process its part of the input.
"""

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mamba_fsdp.errors import LeaseLostError, StorageError, UserError
from mamba_fsdp.run.timestamp import utc_timestamp
from mamba_fsdp.storage.patience import (
    delete,
    exists,
    hidden_beside,
    is_folder,
    list_hidden_beside,
    make_folder,
    move,
    names_in,
    read_once,
    read_text,
    retry_io,
    size_of,
    storage_error,
    sync_folder,
    write_for_user,
)
from mamba_fsdp.storage.typed_json import from_json, parse_object
from mamba_fsdp.text import escape_unprintable, format_quantity
from mamba_fsdp.this_process import progress

SECONDS_BETWEEN_RENEWALS = 5.0
SECONDS_BETWEEN_LOOKS = 1.0
# A holder on another machine counts as dead after this long without a renewal.
SECONDS_OF_SILENCE = 30.0
LARGEST_LEASE = 1 << 16  # bytes

Report = Callable[[str], object]


@dataclass
class Holder:
    """The process that a lease's file names."""

    token: str  # unique for each lease that is taken
    host: str
    pid: int
    since: str
    machine: str | None  # the same for processes that see each other's process ids
    started: int | None  # clock ticks since boot, see _start_of
    job: str | None  # of Slurm

    @classmethod
    def this_process(cls) -> "Holder":
        """Returns what a lease that this process takes now says."""
        pid = os.getpid()
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=pid,
            since=utc_timestamp(),
            machine=_machine(),
            started=_start_of(pid),
            job=os.environ.get("SLURM_JOB_ID"),
        )

    def is_alive(self) -> bool | None:
        """Returns whether the process lives; None if that can't be known."""
        if self.machine is None or self.machine != _machine():
            return None
        return _start_of(self.pid) == self.started

    def __str__(self) -> str:
        job = f" (Slurm job {self.job})" if self.job else ""
        return escape_unprintable(f"process {self.pid} on {self.host}{job}, begun {self.since}")


@dataclass(frozen=True)
class Look:
    """A lease's file at one moment. Two looks differ if the holder has renewed the lease in between."""

    content: bytes
    renewed: int  # ns since the epoch, by the clock of the file server

    def holder(self) -> Holder | None:
        """Returns the holder; None if the file is still being written, was cut short by a crash, or is damaged."""
        with contextlib.suppress(ValueError):
            return from_json(Holder, parse_object(self.content))
        return None

    def is_alive(self) -> bool | None:
        """Returns whether the holder lives; None if that can't be known."""
        holder = self.holder()
        return None if holder is None else holder.is_alive()

    def __str__(self) -> str:
        return str(self.holder() or "an unknown process")


class Lease:
    """The right of this process to write `place`, as `file` records it. A closed lease can't be taken again.

    own: the folder of this process alone. It exists, empty at first, once the lease is taken.
    """

    def __init__(self, file: Path, place: Path | None = None) -> None:
        self.file = file
        self.place = place or file.parent
        self.own = hidden_beside(file)
        self.content: bytes | None = None  # of the file, while this process holds the lease
        self.silent: Look | None = None  # the holder that `shows_life` has found dead
        self.closed = threading.Event()
        self.renewal: threading.Thread | None = None

    def take(self, report: Report, remedy: str) -> None:
        """Takes the lease; waits if only time can tell whether its holder is dead. Raises UserError, which ends in
        `remedy`, if a living process holds it, StorageError after a minute of retries, and OSError."""
        while not self.try_take(report):
            report(f"waiting    to see whether {self.look()} is still alive: it held {self.place}")
            self.check_unused(remedy)

    def check_unused(self, remedy: str) -> None:
        """Raises UserError, which ends in `remedy`, if a holder shows life."""
        holder = self.look()
        if self.shows_life():
            raise UserError(f"{self.place} is in use by {holder}; {remedy}")

    def try_take(self, report: Report = print) -> bool:
        """Returns whether this process holds the lease now. It is False if the holder is another one that is not known
        to be dead. Reports what a killed holder left. Raises as `take` does."""
        content = json.dumps(asdict(Holder.this_process()), indent=1).encode()
        self.content = content
        while not retry_io(partial(self._claim, content), self.file):
            seen = self.look()
            if seen is None or seen.content == content:
                continue
            if seen.is_alive() is not False and seen != self.silent:
                delete(self.own)
                return False
            retry_io(self._take_away, self.file)
        self.renewal = threading.Thread(target=self._renew, name="lease", daemon=True)
        self.renewal.start()
        size = size_of(self.own)
        for name in names_in(self.own):  # none if the lease is lost already
            delete(self.own / name)
        if size:
            report(
                f"cleaned    {format_quantity(size, 'B')}, which a killed process left unfinished, removed from {self.place}"
            )
        return True

    def _claim(self, content: bytes) -> bool:
        """Makes the file if there is none. Returns whether this process holds the lease and has moved away all other
        own folders."""
        # Make the own folder before any look at the file: whoever takes the lease later moves the folder away, and our
        # rename into it, based on a stale look, fails.
        with contextlib.suppress(FileExistsError):
            self.own.mkdir()
        with contextlib.suppress(FileExistsError):
            file = open(self.file, "xb")
            try:
                with file:
                    file.write(content)
            except OSError:  # half a lease would count as another's
                self.file.unlink(missing_ok=True)
                raise
        if not self.is_held():
            return False
        for other in list_hidden_beside(self.file):
            if other != self.own:
                with contextlib.suppress(FileNotFoundError):
                    other.rename(self.own / other.name)
        return self.is_held() and is_folder(self.own)

    def _take_away(self) -> None:
        """Moves the file into the own folder; does nothing if another process was faster."""
        with contextlib.suppress(FileNotFoundError):
            self.file.rename(self.own / "lease")
            (self.own / "lease").unlink()

    def shows_life(self) -> bool:
        """Returns whether the holder renews the lease within SECONDS_OF_SILENCE. If it does not, `try_take` takes it."""
        before = self.look()
        # By this machine's clock: another host's may be wrong.
        end = time.monotonic() + SECONDS_OF_SILENCE
        while True:
            now = self.look()
            if now is None:
                return False
            if now != before:
                return True
            if now.is_alive() is False or time.monotonic() >= end:
                self.silent = now
                return False
            progress.touch()
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def is_held(self) -> bool:
        """Returns whether this process holds the lease. Raises OSError as the disk does."""
        seen = self._look()
        return seen is not None and seen.content == self.content

    def check(self, trying: Callable[..., Any] = retry_io) -> None:
        """Raises LeaseLostError if this process no longer holds the lease, UserError if that can't be known. It is for what
        can't be renamed into place; a process that is suspended after this check may still write once."""
        try:
            seen = trying(self._look_in_folder, self.file)
        except OSError as error:
            raise storage_error(
                error, f"{self.file}: can't be read ({error.strerror}); fix that and run again"
            ) from None
        if seen and seen.content == self.content:
            return
        what = f"has lost its {self.file.name}"
        if seen:
            what = f"is in use by {seen}"
        raise LeaseLostError(
            f"{self.place} {what}: this run was suspended for a while, or somebody removed the file; it "
            "stops here and writes nothing more"
        )

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Raises LeaseLostError if something inside fails because another process has moved the own folder away."""
        try:
            yield
        except FileNotFoundError:
            self.check()
            raise

    def move(self, old: Path, new: Path) -> None:
        """Renames to a name that is free; one of both lies in the own folder. Raises LeaseLostError, and OSError."""
        with self.guard():
            move(old, new)

    def remove(self, path: Path) -> None:
        """Removes a file or folder so that nobody ever sees half of it. Raises as `move` does."""
        hidden = hidden_beside(self.own / path.name)
        self.move(path, hidden)
        delete(hidden)

    def write(self, path: Path, data: str | bytes) -> None:
        """Writes a file; readers see the old content or all of `data`. Raises LeaseLostError, and UserError."""
        try:
            write_for_user(path, data, self.own)
        except UserError:
            self.check()
            raise

    def look(self) -> Look | None:
        """Returns what the file says now; None if there is none. Raises StorageError after a minute of retries, and OSError."""
        return retry_io(self._look, self.file)

    def _look(self) -> Look | None:
        try:
            # Opening makes NFS ask its server. A link is refused: one that leads nowhere can neither be read nor made.
            return Look(*read_once(self.file, LARGEST_LEASE, os.O_NOFOLLOW))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                error.errno = errno.EACCES
                error.strerror = f"{self.file.name} is a link; remove it"
            raise

    def _look_in_folder(self) -> Look | None:
        """Does as `_look`, but raises OSError if there is not even a folder for the file."""
        os.stat(self.file.parent)
        return self._look()

    def _renew(self) -> None:
        while not self.closed.wait(SECONDS_BETWEEN_RENEWALS):
            with contextlib.suppress(OSError):  # the next renewal may succeed
                if self.is_held():
                    os.utime(self.file)

    def close(self) -> None:
        """Gives the lease back, if this process holds it, and removes the own folder."""
        self.closed.set()
        if self.renewal:
            self.renewal.join(1.0)  # longer only if storage keeps it waiting
        if self.content is None:
            return
        with contextlib.suppress(OSError, StorageError):
            retry_io(self._give_back, self.file)
        delete(self.own)

    def _give_back(self) -> None:
        if self.is_held():
            self._take_away()


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields a folder to write in, by functions of storage/patience.py that return when all is on the disk. It becomes
    `out` once the block has ended, and is removed if the block fails. Raises UserError if `out` is not free, another process writes it, or the disk refuses."""
    if exists(out):
        raise UserError(f"{out} exists already; name a new folder, or remove it first")
    lease = Lease(out.with_name(f".{out.name}.lease"), out)
    unfinished = lease.own / out.name
    try:
        make_folder(out.parent, parents=True)
        lease.take(partial(print, file=sys.stderr), "wait for it, or name another folder")
        make_folder(unfinished)
        yield unfinished
        sync_folder(unfinished)
        lease.move(unfinished, out)
        sync_folder(out.parent)
    except OSError as error:
        raise storage_error(error, f"can't write {out}: {error.strerror or error}") from None
    finally:
        lease.close()


def _machine() -> str | None:
    """Returns a name that is the same for processes that see each other's process ids; None without Linux's /proc."""
    with contextlib.suppress(OSError):
        boot = read_text("/proc/sys/kernel/random/boot_id").strip()
        return boot + os.readlink("/proc/self/ns/pid")
    return None


def _start_of(pid: int) -> int | None:
    """Returns when a process started, in clock ticks since boot: it tells processes with the same id apart. None if it has
    ended."""
    with contextlib.suppress(OSError, ValueError):
        _, _, after_name = read_text(f"/proc/{pid}/stat").rpartition(")")
        state, *fields = after_name.split()
        if state not in "ZX":
            return int(fields[18])
    return None
