"""One process at a time, on whatever machine: it holds a lease, a file that it renews for as long as it lives.

Not a lock of the operating system: on a shared file system the mount options decide whether other hosts see it. A lease
that is no longer renewed expires, so no crash needs a clean-up by hand; and a process that was frozen until another
took over what it held finds out before it writes again. A run holds its run folder, tokenising a unit of the input.
"""

import contextlib
import datetime
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mamba_fsdp.errors import LostError, UserError
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.storage import hidden_beside, like, parse_object, retry_io

SECONDS_BETWEEN_RENEWALS = 5.0
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_OF_SILENCE = (
    30.0  # without renewal, after which a holder that can't be asked counts as dead
)


class Lease:
    """The right of this process to write what `file` stands for."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.content: bytes | None = None  # of the file, while it is ours
        self.ended = threading.Event()

    def take(self, report: Callable[[str], None]) -> None:
        """Of a run folder. Raises UserError when a living run holds it, StorageError after patient trying, OSError."""
        while not self.try_take():
            holder = self.holder()
            report(
                f"waiting    to see whether the run of {holder} still lives: it held {self.file.parent}"
            )
            if living([self]):
                raise UserError(
                    f"{self.file.parent} is in use by the run of {self.holder() or holder}; stop that run "
                    "first, or give this one another save_ckpt_path"
                )

    def try_take(self) -> bool:
        """Whether it is ours now; not where another holds it who is not known to have ended. Raises as `take` does.

        Two that take over from a dead holder at once may both succeed; the first to ask `is_held` learns that it lost.
        """
        content = json.dumps({"token": uuid.uuid4().hex, **_this_process()}, indent=1).encode()
        while not retry_io(lambda: self._create(content), self.file):
            seen = retry_io(self._look, self.file)
            if seen and not _has_ended(_owner(seen)):
                return False
            if seen:
                retry_io(self._remove, self.file)
        self.content, self.ended = content, threading.Event()
        threading.Thread(target=self._renew, args=[self.ended], name="lease", daemon=True).start()
        return True

    def is_held(self) -> bool:
        """Whether this process holds it. Raises OSError as the disk does."""
        seen = self._look() if self.content else None
        return seen is not None and seen[0] == self.content

    def check(self, trying: Callable[..., Any] = retry_io) -> None:
        """Raises LostError when another run holds the run folder by now, UserError where that can't be known. Called
        before each write that must not mix."""
        try:
            if trying(self.is_held, self.file):
                return
            seen = trying(self._look, self.file)
            os.stat(self.file.parent)
        except OSError as error:
            raise UserError(
                f"{self.file}: can't be read ({error.strerror}); mend that and run again"
            ) from None
        by = (
            f"is in use by the run of {_describe(_owner(seen))}"
            if seen
            else f"has lost its {self.file.name}"
        )
        raise LostError(
            f"{self.file.parent} {by}: this run stood still for a while, or somebody removed the file; it "
            "stops here and writes nothing more"
        )

    def holder(self) -> str:
        """Who holds it; "" where nobody does. Raises OSError as the disk does."""
        seen = retry_io(self._look, self.file)
        return _describe(_owner(seen)) if seen else ""

    def ended_holder(self) -> str:
        """Who held it and is known to have ended without giving it back, or "". Raises OSError as the disk does."""
        seen = self._look()
        return _describe(_owner(seen)) if seen and _has_ended(_owner(seen)) else ""

    def give_back(self) -> None:
        self.ended.set()
        with contextlib.suppress(OSError):
            if self.is_held():
                self.file.unlink()

    def _create(self, content):
        with contextlib.suppress(FileExistsError), open(self.file, "xb", buffering=0) as file:
            try:
                file.write(content)
                return True
            except OSError:
                self.file.unlink(
                    missing_ok=True
                )  # else the next attempt finds a run that does not say which
                raise
        return False

    def _remove(self):
        left_over = hidden_beside(self.file)
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            self.file.rename(left_over)
            left_over.unlink()

    def _look(self):
        """(content, time of the last renewal) of the file, for comparison with another look; None without a file."""
        with (
            contextlib.suppress(FileNotFoundError),
            open(self.file, "rb") as file,
        ):  # opening makes NFS ask its server
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
        return None

    def _renew(self, ended):
        while not ended.wait(SECONDS_BETWEEN_RENEWALS):
            with contextlib.suppress(OSError):  # the next renewal may succeed
                if self.is_held():
                    os.utime(self.file)


def living(leases: Sequence[Lease]) -> list[Lease]:
    """Those whose holder shows a sign of life within SECONDS_OF_SILENCE; the others can be taken then."""
    unsure, alive = {lease: retry_io(lease._look, lease.file) for lease in leases}, []
    end = time.monotonic() + SECONDS_OF_SILENCE  # of our clock: that of another host may be wrong
    while True:
        silent = time.monotonic() >= end
        for lease, before in list(unsure.items()):
            now = retry_io(lease._look, lease.file)
            if now and now == before and not silent and not _has_ended(_owner(now)):
                continue
            del unsure[lease]
            if now and now != before:
                alive.append(lease)
            elif now:
                retry_io(lease._remove, lease.file)
        if not unsure:
            return alive
        heart.beat()
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _this_process():
    now, pid = (
        datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        os.getpid(),
    )
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "since": now,
        "machine": _machine(),
        "started": _start_of(pid),
        "job": os.environ.get("SLURM_JOB_ID"),
        "attempt": float(os.environ.get("SLURM_RESTART_COUNT") or 0),
    }


def _machine():
    """The same for processes that can ask for each other by process id; None where Linux's /proc is missing."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink(
            "/proc/self/ns/pid"
        )
    return None


def _start_of(pid):
    """When a process started (clock ticks since boot), which tells it from others of its id; None when it has ended."""
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18])
    return None


def _has_ended(owner):
    """Whether the process is known to have ended; False also where that can't be known."""
    here = _this_process()
    if owner.get("job") and owner["job"] == here["job"] and owner["attempt"] < here["attempt"]:
        return True  # Slurm starts a job again only when it is over; were this one alive, it would lose its lease
    if not owner.get("machine") or owner["machine"] != here["machine"]:
        return False
    try:
        os.kill(owner["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False  # it is another user's
    return _start_of(owner["pid"]) != owner["started"]


def _owner(seen):
    """Who holds the lease; {} when its file is still being written, or was cut short by a crash or damaged."""
    with contextlib.suppress(ValueError):
        owner = like(parse_object(seen[0]), {"host": "", "pid": 1, "since": "", "attempt": 0.0})
        return {"job": None, "machine": None, "started": None, **owner}
    return {}


def _describe(owner):
    if not owner:
        return "a process that does not say which"
    job = f" (Slurm job {owner['job']})" if owner["job"] else ""
    return f"process {owner['pid']} on {owner['host']}{job}, begun {owner['since']}"
