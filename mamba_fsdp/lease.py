"""One process at a time, on whatever machine: it holds a lease, a file that it renews for as long as it lives.

Not a lock of the operating system: on a shared file system the mount options decide whether other hosts see it. A lease
that is no longer renewed expires, so no crash needs a clean-up by hand; and a process that was frozen until another
took over what it held finds out before it writes again. A run holds its run folder, tokenising a unit of the input.
"""

import contextlib
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mamba_fsdp.errors import LostError, UserError
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.storage import hidden_beside, parse_object, retry_io, timestamp

SECONDS_BETWEEN_RENEWALS = 5.0
SECONDS_BETWEEN_LOOKS = 1.0
# Without renewal, after which a holder that can't be asked counts as dead.
SECONDS_OF_SILENCE = 30.0


@dataclass
class Holder:
    """The process that a lease's file names."""

    token: str  # no other process has it, nor this one for another lease
    host: str
    pid: int
    since: str
    machine: str | None  # the same for processes that can ask for each other by process id
    started: int | None  # clock ticks since boot, see _start_of
    job: str | None  # of Slurm

    @classmethod
    def this_process(cls) -> "Holder":
        pid = os.getpid()
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=pid,
            since=timestamp(),
            machine=_machine(),
            started=_start_of(pid),
            job=os.environ.get("SLURM_JOB_ID"),
        )

    def has_ended(self) -> bool:
        """Whether the process is known to have ended; False also where that can't be known."""
        is_here = self.machine is not None and self.machine == _machine()
        return is_here and _start_of(self.pid) != self.started

    def __str__(self) -> str:
        job = f" (Slurm job {self.job})" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, begun {self.since}"


@dataclass(frozen=True)
class Look:
    """A lease's file at a moment. A later look is another one where the holder has renewed it meanwhile."""

    content: bytes
    renewed: int  # ns since the epoch, of the clock of whoever keeps the file

    def holder(self) -> Holder | None:
        """None where the file is still being written, or was cut short by a crash or damaged."""
        with contextlib.suppress(ValueError, TypeError):
            return Holder(**parse_object(self.content))
        return None

    def has_ended(self) -> bool:
        holder = self.holder()
        return holder is not None and holder.has_ended()

    def __str__(self) -> str:
        return str(self.holder() or "an unknown process")


class Lease:
    """The right of this process to write what `file` stands for. Once closed, another Lease is to be taken."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.content: bytes | None = None  # of the file, while it is ours
        self.ended = threading.Event()

    def take(self, report: Callable[[str], None], remedy: str) -> None:
        """Raises UserError, which ends in `remedy`, when a living run holds it, StorageError after patient trying,
        OSError."""
        while not self.try_take():
            holder = self.look()
            report(
                f"waiting    to see whether the run of {holder} is still alive: it held {self.file.parent}"
            )
            if self.shows_life():
                raise UserError(f"{self.file.parent} is in use by the run of {holder}; {remedy}")

    def try_take(self) -> bool:
        """Whether it is ours now; not where another holds it who is not known to have ended. Raises as `take` does."""
        content = json.dumps(asdict(Holder.this_process()), indent=1).encode()
        while not retry_io(partial(self._create, content), self.file):
            seen = self.look()
            if seen and not seen.has_ended():
                return False
            if seen:
                retry_io(partial(self._remove, seen.content), self.file)
        self.content = content
        threading.Thread(target=self._renew, name="lease", daemon=True).start()
        return True

    def shows_life(self) -> bool:
        """Whether its holder renews it within SECONDS_OF_SILENCE. If not, it can be taken then."""
        before = self.look()
        # Of our clock: that of another host may be wrong.
        end = time.monotonic() + SECONDS_OF_SILENCE
        while True:
            now = self.look()
            if now is None:
                return False
            if now != before:
                return True
            if now.has_ended() or time.monotonic() >= end:
                retry_io(partial(self._remove, now.content), self.file)
                return False
            heart.beat()
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def is_held(self) -> bool:
        """Whether this process holds it. Raises OSError as the disk does."""
        return self._is_ours(self._look())

    def _is_ours(self, seen):
        return seen is not None and seen.content == self.content

    def check(self, trying: Callable[..., Any] = retry_io) -> None:
        """Raises LostError when another run holds the run folder by now, UserError where that can't be known. Called
        before each write that must not mix."""
        try:
            seen = trying(self._look, self.file)
            os.stat(self.file.parent)
        except OSError as error:
            raise UserError(
                f"{self.file}: can't be read ({error.strerror}); fix that and run again"
            ) from None
        if self._is_ours(seen):
            return
        what = f"has lost its {self.file.name}"
        if seen:
            what = f"is in use by the run of {seen}"
        raise LostError(
            f"{self.file.parent} {what}: this run was suspended for a while, or somebody removed the file; it "
            "stops here and writes nothing more"
        )

    def look(self) -> Look | None:
        """What its file says now; None without one. Raises StorageError after patient trying, OSError."""
        return retry_io(self._look, self.file)

    def close(self) -> None:
        self.ended.set()
        if self.content:
            with contextlib.suppress(OSError):
                self._remove(self.content)

    def _create(self, content):
        with contextlib.suppress(FileExistsError), open(self.file, "xb", buffering=0) as file:
            file.write(content)
            return True
        return False

    def _remove(self, content):
        """Removes the file with this content, and no other's, however long this process may stand still in between: it
        moves to a folder of this process, and who removes the lease clears away all such folders before it takes it."""
        own = hidden_beside(self.file)
        own.mkdir()
        seen = self._look()
        if seen and seen.content == content:
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                self.file.rename(own / "lease")
        for folder in self.file.parent.glob(f".{self.file.name}.*.partial"):
            shutil.rmtree(folder, ignore_errors=True)

    def _look(self):
        # Opening makes NFS ask its server.
        with contextlib.suppress(FileNotFoundError), open(self.file, "rb") as file:
            return Look(file.read(), os.fstat(file.fileno()).st_mtime_ns)
        return None

    def _renew(self):
        while not self.ended.wait(SECONDS_BETWEEN_RENEWALS):
            with contextlib.suppress(OSError):  # the next renewal may succeed
                if self.is_held():
                    os.utime(self.file)


def _machine():
    """The same for processes that can ask for each other by process id; None where Linux's /proc is missing."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot + os.readlink("/proc/self/ns/pid")
    return None


def _start_of(pid):
    """When a process started (clock ticks since boot), which tells it from others of its id; None when it has ended."""
    with contextlib.suppress(OSError, ValueError):
        _, _, after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        state, *fields = after_name.split()
        if state not in "ZX":
            return int(fields[18])
    return None
