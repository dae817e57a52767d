"""Implements leases: at any time, only the process that owns the lease of a folder writes there.

A lease is a file. Its holder renews it, by updating the modification time, as long as the process lives. A lease that
is no longer renewed expires, so nobody has to clean up after a crash. Locks of the operating system are not used,
because on a shared file system, other hosts see them only with some mount options.

A process can be suspended at any moment, even between checking its lease and the write that follows, and continue after
another process has acquired the lease. Therefore the holder does not write in place. It has a staging folder next to
the lease (.<lease>.<unique>.partial), writes there, and then renames finished files and folders to their final names. A
process that acquires the lease first moves all other staging folders into its own. After that, every rename by an
earlier holder fails. Unfinished files of a killed process are in its staging folder and are removed with it.

A run leases its run folder. An export leases the folder that it creates. A process that tokenizes leases its part of the
input.
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
from mamba_fsdp.storage.retry import (
    delete,
    exists,
    is_folder,
    list_names,
    list_temporary_paths,
    make_folder,
    move,
    read_once,
    read_text,
    retry_io,
    size_of,
    storage_error,
    sync_folder,
    temporary_path,
    write_for_user,
)
from mamba_fsdp.storage.typed_json import from_json, parse_object
from mamba_fsdp.text import escape_unprintable, format_quantity, utc_timestamp
from mamba_fsdp.this_process import progress

RENEWAL_SECONDS = 5.0
POLL_SECONDS = 1.0
# A holder on another machine counts as dead after this long without a renewal.
EXPIRY_SECONDS = 30.0
MAX_LEASE_BYTES = 1 << 16

Report = Callable[[str], object]


@dataclass
class Holder:
    """The process that owns a lease, as described by the lease file."""

    token: str  # unique for each acquisition
    host: str
    pid: int
    since: str  # when the lease was acquired, in UTC
    machine: str | None  # boot id and PID namespace of the host, see _process_namespace
    started: int | None  # see _process_start_time
    job: str | None  # the Slurm job id

    @classmethod
    def this_process(cls) -> "Holder":
        """Returns the description of this process for a lease that it acquires now."""
        pid = os.getpid()
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=pid,
            since=utc_timestamp(),
            machine=_process_namespace(),
            started=_process_start_time(pid),
            job=os.environ.get("SLURM_JOB_ID"),
        )

    def is_alive(self) -> bool | None:
        """Returns whether the process is alive; None if it runs where this process can't see it."""
        if self.machine is None or self.machine != _process_namespace():
            return None
        return _process_start_time(self.pid) == self.started

    def __str__(self) -> str:
        job = f" (Slurm job {self.job})" if self.job else ""
        return escape_unprintable(f"process {self.pid} on {self.host}{job}, begun {self.since}")


@dataclass(frozen=True)
class LeaseSnapshot:
    """The state of a lease file at one moment. Two snapshots differ if the lease was renewed between them."""

    content: bytes
    renewed: int  # nanoseconds since the epoch, by the clock of the file server

    def holder(self) -> Holder | None:
        """Returns the holder; None if the file is still being written, was truncated by a crash, or is damaged."""
        with contextlib.suppress(ValueError):
            return from_json(Holder, parse_object(self.content))
        return None

    def is_alive(self) -> bool | None:
        """Returns whether the holder is alive; None if it runs where this process can't see it."""
        holder = self.holder()
        return None if holder is None else holder.is_alive()

    def __str__(self) -> str:
        return str(self.holder() or "an unknown process")


class Lease:
    """A lease that gives this process the right to write to `target`. A closed lease can't be acquired again.

    file: the lease file. target: the folder that is leased, by default the folder of `file`. staging: the staging
    folder of this process. This folder exists and is empty once the lease is acquired.
    """

    def __init__(self, file: Path, target: Path | None = None) -> None:
        self.file = file
        self.target = target or file.parent
        self.staging = temporary_path(file)
        self.content: bytes | None = None  # the file's content while this process owns the lease
        # The last snapshot of a lease that its holder did not renew while `is_renewed` waited.
        self.expired: LeaseSnapshot | None = None
        self.closed = threading.Event()
        self.renewal: threading.Thread | None = None

    def acquire(self, report: Report, remedy: str) -> None:
        """Acquires the lease. If the holder is on another machine, waits to see whether it renews the lease.

        report: prints a line for the user. remedy: the advice at the end of the error message.

        Raises UserError if a live process owns the lease, StorageError if the storage keeps failing for a minute, and
        OSError for other errors of the file system.
        """
        while not self.try_acquire(report):
            report(
                f"waiting    to see whether {self.read_snapshot()} is still alive, because it used {self.target}"
            )
            self.check_unused(remedy)

    def check_unused(self, remedy: str) -> None:
        """Waits for at most EXPIRY_SECONDS. Raises UserError, with `remedy` at the end of the message, as soon as the holder
        renews the lease."""
        holder = self.read_snapshot()
        if self.is_renewed():
            raise UserError(f"{self.target} is in use by {holder}; {remedy}")

    def try_acquire(self, report: Report = print) -> bool:
        """Tries to acquire the lease, without waiting for it to expire. Returns whether this process owns it now.

        Returns False if another process owns the lease and is not known to be dead. Otherwise removes the unfinished
        files of earlier holders and reports their size. Raises StorageError and OSError like `acquire`.
        """
        content = json.dumps(asdict(Holder.this_process()), indent=1).encode()
        self.content = content
        while not retry_io(partial(self._claim, content), self.file):
            snapshot = self.read_snapshot()
            if snapshot is None or snapshot.content == content:
                continue
            if snapshot.is_alive() is not False and snapshot != self.expired:
                delete(self.staging)
                return False
            retry_io(self._move_file_away, self.file)
        self.renewal = threading.Thread(target=self._renew, name="lease", daemon=True)
        self.renewal.start()
        size = size_of(self.staging)
        for name in list_names(self.staging):  # the list is empty if the lease is lost already
            delete(self.staging / name)
        if size:
            report(
                f"cleaned    removed {format_quantity(size, 'B')} of unfinished files of a killed process from {self.target}"
            )
        return True

    def _claim(self, content: bytes) -> bool:
        """Creates the lease file if it does not exist. Returns whether this process owns the lease.

        If the result is true, all other staging folders have been moved into the staging folder of this process.
        """
        # Create the staging folder before reading the lease. Another process that acquires the lease after this moves
        # the folder away. If this process then still acts on what it has read, its renames into the folder and out of
        # it fail, because the folder is gone.
        with contextlib.suppress(FileExistsError):
            self.staging.mkdir()
        with contextlib.suppress(FileExistsError):
            file = open(self.file, "xb")
            try:
                with file:
                    file.write(content)
            except OSError:  # a partly written file would look like the lease of another process
                self.file.unlink(missing_ok=True)
                raise
        if not self.is_held():
            return False
        for other in list_temporary_paths(self.file):
            if other != self.staging:
                with contextlib.suppress(FileNotFoundError):
                    other.rename(self.staging / other.name)
        return self.is_held() and is_folder(self.staging)

    def _move_file_away(self) -> None:
        """Removes the lease file, by a rename, so that only one of several processes succeeds.

        The others do nothing.
        """
        with contextlib.suppress(FileNotFoundError):
            self.file.rename(self.staging / "lease")
            (self.staging / "lease").unlink()

    def is_renewed(self) -> bool:
        """Waits until the holder renews the lease, for at most EXPIRY_SECONDS. Returns whether it did.

        After False, `try_acquire` can acquire the lease.
        """
        before = self.read_snapshot()
        # Measure with this machine's clock, because the clock of the other host can be wrong.
        end = time.monotonic() + EXPIRY_SECONDS
        while True:
            now = self.read_snapshot()
            if now is None:
                return False
            if now != before:
                return True
            if now.is_alive() is False or time.monotonic() >= end:
                self.expired = now
                return False
            progress.touch()
            time.sleep(POLL_SECONDS)

    def is_held(self) -> bool:
        """Returns whether this process owns the lease. Raises OSError if the file can't be read."""
        snapshot = self._read_snapshot()
        return snapshot is not None and snapshot.content == self.content

    def check(self, trying: Callable[..., Any] = retry_io) -> None:
        """Raises LeaseLostError if this process no longer owns the lease, and UserError if the file can't be read.

        Call it before writing to files that can't be renamed into place. A process that is suspended right after this
        check can still write once after it has lost the lease.

        trying: a function that is called like retry_io and reads the lease file. By default, transient errors are retried.
        """
        try:
            snapshot = trying(self._read_snapshot_in_folder, self.file)
        except OSError as error:
            raise storage_error(
                error, f"{self.file}: can't be read ({error.strerror}); fix that and run again"
            ) from None
        if snapshot and snapshot.content == self.content:
            return
        what = f"has lost its {self.file.name}"
        if snapshot:
            what = f"is in use by {snapshot}"
        raise LeaseLostError(
            f"{self.target} {what}: this run was suspended for a while, or somebody removed the file. The run stops here and "
            "writes nothing more; the same command resumes when the other process has ended"
        )

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Raises LeaseLostError if the block fails because another process has moved the staging folder away."""
        try:
            yield
        except FileNotFoundError:
            self.check()
            raise

    def move(self, old: Path, new: Path) -> None:
        """Renames `old` to `new`. Nothing named `new` can exist, and one of the two must be in the staging folder.

        Raises LeaseLostError if this process has lost the lease, and OSError.
        """
        with self.guard():
            move(old, new)

    def remove(self, path: Path) -> None:
        """Removes a file or folder. Other processes see either all of it or nothing.

        Raises LeaseLostError if this process has lost the lease, and OSError.
        """
        hidden = temporary_path(self.staging / path.name)
        self.move(path, hidden)
        delete(hidden)

    def write(self, path: Path, data: str | bytes) -> None:
        """Replaces a file atomically: readers see either the old content or all of `data`.

        Raises LeaseLostError if this process has lost the lease, and UserError if the disk fails.
        """
        try:
            write_for_user(path, data, self.staging)
        except UserError:
            self.check()
            raise

    def read_snapshot(self) -> LeaseSnapshot | None:
        """Returns the current state of the lease file; None if it does not exist.

        Raises StorageError if the storage keeps failing for a minute, and OSError for other errors.
        """
        return retry_io(self._read_snapshot, self.file)

    def _read_snapshot(self) -> LeaseSnapshot | None:
        try:
            # Opening the file makes an NFS client ask its server for the current version. Symbolic links are rejected:
            # if the target of a link is missing, the lease can't be read, and creating it fails because the link exists.
            return LeaseSnapshot(*read_once(self.file, MAX_LEASE_BYTES, os.O_NOFOLLOW))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                error.errno = errno.EACCES
                error.strerror = f"{self.file.name} is a link; remove it"
            raise

    def _read_snapshot_in_folder(self) -> LeaseSnapshot | None:
        """Reads a snapshot, but raises OSError instead of returning None if the folder of the file is missing."""
        os.stat(self.file.parent)
        return self._read_snapshot()

    def _renew(self) -> None:
        while not self.closed.wait(RENEWAL_SECONDS):
            with contextlib.suppress(OSError):  # the next renewal can succeed
                if self.is_held():
                    os.utime(self.file)

    def close(self) -> None:
        """Releases the lease, if this process owns it, and removes the staging folder."""
        self.closed.set()
        if self.renewal:
            # The thread ends within this time, unless the storage does not answer.
            self.renewal.join(1.0)
        if self.content is None:
            return
        with contextlib.suppress(OSError, StorageError):
            retry_io(self._release, self.file)
        delete(self.staging)

    def _release(self) -> None:
        if self.is_held():
            self._move_file_away()


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields a folder to write to, and renames it to `out` at the end of the block. Removes it if the block fails.

    The block must write with those functions of storage/retry.py that return when the data is on the disk. Raises
    UserError if `out` exists, if another process is writing it, or if the disk fails.
    """
    if exists(out):
        raise UserError(f"{out} exists already; name a new folder, or remove it first")
    lease = Lease(out.with_name(f".{out.name}.lease"), out)
    unfinished = lease.staging / out.name
    try:
        make_folder(out.parent, parents=True)
        lease.acquire(partial(print, file=sys.stderr), "wait for it, or name another folder")
        make_folder(unfinished)
        yield unfinished
        sync_folder(unfinished)
        lease.move(unfinished, out)
        sync_folder(out.parent)
    except OSError as error:
        raise storage_error(error, f"can't write {out}: {error.strerror or error}") from None
    finally:
        lease.close()


def _process_namespace() -> str | None:
    """Returns a text that identifies this boot of the host and this PID namespace; None without Linux's /proc.

    A process id is unique only within one boot and one PID namespace.
    """
    with contextlib.suppress(OSError):
        boot = read_text("/proc/sys/kernel/random/boot_id").strip()
        return boot + os.readlink("/proc/self/ns/pid")
    return None


def _process_start_time(pid: int) -> int | None:
    """Returns when a process started, in clock ticks since boot; None if it has ended.

    The start time distinguishes processes that had the same process id one after the other.
    """
    with contextlib.suppress(OSError, ValueError):
        _, _, after_name = read_text(f"/proc/{pid}/stat").rpartition(")")
        state, *fields = after_name.split()
        if state not in "ZX":
            return int(fields[18])
    return None
