"""One run at a time in a run folder: rank 0 holds a lease on it, the file lease.json, renewed for as long as it lives.

Not a lock of the operating system: on a shared file system the mount options decide whether other hosts see it. A lease
that is no longer renewed expires, so no crash needs a clean-up by hand; and a run that was frozen until another took
over its folder finds out before it writes again.
"""

import contextlib
import datetime
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from mamba_fsdp.durable import hidden_beside
from mamba_fsdp.errors import UserError
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.run_layout import LEASE
from mamba_fsdp.storage import patiently

SECONDS_BETWEEN_RENEWALS = 5.0
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_OF_SILENCE = 30.0  # without renewal, after which a holder that can't be asked counts as dead


class Lease:
    """The right of this process to write into a run folder. Only rank 0 takes it."""

    def __init__(self, run_folder: Path) -> None:
        self.file = run_folder / LEASE
        self.content: bytes | None = None  # of the file, while it is ours
        self.ended = threading.Event()

    def take(self, report: Callable[[str], None]) -> None:
        """Raises UserError when a living run holds the folder, within SECONDS_OF_SILENCE; StorageError after patient
        trying, and OSError as the disk does.

        Of two that take over a dead run's folder in the same millisecond, both may succeed; the first `check` ends one.
        """
        content = json.dumps({"token": uuid.uuid4().hex, **_this_process()}, indent=1).encode()
        while not patiently(lambda: self._create(content), self.file):
            seen = patiently(self._look, self.file)
            if seen and not _has_ended(_owner(seen)):
                report(f"waiting    to see whether {_describe(_owner(seen))} still lives: it held {self.file.parent}")
                before, seen = seen, self._watch(seen)
                if seen and seen != before:
                    raise UserError(f"{self.file.parent} is in use by {_describe(_owner(seen))}; stop that run first, "
                                    "or give this one another save_ckpt_path")
            if seen:
                patiently(self._remove, self.file)
        self.content = content
        threading.Thread(target=self._renew, name="lease", daemon=True).start()

    def is_held(self) -> bool:
        """Whether this process holds the folder. Raises OSError as the disk does."""
        seen = self._look() if self.content else None
        return seen is not None and seen[0] == self.content

    def check(self) -> None:
        """Raises UserError when another run holds the folder by now. Called before each write that must not mix."""
        try:
            if patiently(self.is_held, self.file):
                return
            seen = patiently(self._look, self.file)
        except OSError as error:
            raise UserError(f"{self.file}: can't be read ({error.strerror}); mend that, then the same command resumes"
                            ) from None
        by = f"is in use by {_describe(_owner(seen))}" if seen else f"has lost its {LEASE}"
        raise UserError(f"{self.file.parent} {by}: this run stood still for a while, or somebody removed the file; it "
                        "stops here and writes nothing more")

    def ended_holder(self) -> str:
        """Who held the folder and is known to have ended without giving it back; "" where there is none such. Raises
        OSError as the disk does."""
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
                self.file.unlink(missing_ok=True)  # else the next attempt finds a run that does not say which
                raise
        return False

    def _remove(self):
        left_over = hidden_beside(self.file)
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            self.file.rename(left_over)
            left_over.unlink()

    def _look(self):
        """(content, time of the last renewal) of the file, for comparison with another look; None without a file."""
        with contextlib.suppress(FileNotFoundError), open(self.file, "rb") as file:  # opening makes NFS ask its server
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
        return None

    def _watch(self, seen):
        """What `_look` gives once it differs from what was `seen`, or after SECONDS_OF_SILENCE."""
        end = time.monotonic() + SECONDS_OF_SILENCE  # of our clock: that of another host may be wrong
        while (now := patiently(self._look, self.file)) == seen and time.monotonic() < end:
            heart.beat()
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return now

    def _renew(self):
        while not self.ended.wait(SECONDS_BETWEEN_RENEWALS):
            with contextlib.suppress(OSError):  # the next renewal may succeed
                if self.is_held():
                    os.utime(self.file)


def _this_process():
    now, pid = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "since": now, "machine": _machine(), "started": _start_of(pid),
            "job": os.environ.get("SLURM_JOB_ID"), "attempt": int(os.environ.get("SLURM_RESTART_COUNT") or 0)}


def _machine():
    """The same for processes that can ask for each other by process id; None where Linux's /proc is missing."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
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
    except ProcessLookupError:
        return True
    except OSError:
        return False  # it is another user's
    return _start_of(owner["pid"]) != owner["started"]


def _owner(seen):
    """Who holds the lease; {} when its file is still being written, or was cut short by a crash."""
    with contextlib.suppress(ValueError):
        return json.loads(seen[0])
    return {}


def _describe(owner):
    if not owner:
        return "a run that does not say which"
    job = f" (Slurm job {owner['job']})" if owner["job"] else ""
    return f"the run of process {owner['pid']} on {owner['host']}{job}, begun {owner['since']}"
