"""One run at a time in a run folder: rank 0 holds a lease on it, the file lease.json, renewed for as long as it lives.

Not a lock of the operating system, which on a shared file system may reach other hosts or not, depending on how it is
mounted. A lease that is no longer renewed stops nobody for long, so that no crash needs a clean-up by hand; and a run
that stood still until another took its folder over finds out before it writes again.
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

from mamba_fsdp.errors import UserError
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.run_layout import LEASE

SECONDS_BETWEEN_RENEWALS = 5.0
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_OF_SILENCE = 30.0  # a holder that can't be asked counts as dead after these without renewal


class Lease:
    """The right of this process to write into a run folder. Only rank 0 takes it."""

    def __init__(self, run_folder: Path) -> None:
        self.file = run_folder / LEASE
        self.content: bytes | None = None  # of the file, while it is ours
        self.ended = threading.Event()

    def take(self, report: Callable[[str], None]) -> None:
        """Raises UserError when a living run holds the folder, OSError as the disk does. Returns after at most
        SECONDS_OF_SILENCE.

        Two that take over a dead run's folder in the same millisecond may both get through; the first `check` ends one.
        """
        content = json.dumps({"token": uuid.uuid4().hex, **_this_process()}, indent=1).encode()
        while not self._create(content):
            seen = self._look()
            if seen and not _has_ended(_owner(seen)):
                report(f"waiting    to see whether {_describe(_owner(seen))} still lives, which held "
                       f"{self.file.parent}")
                before, seen = seen, self._watch(seen)
                if seen and seen != before:
                    raise UserError(f"{self.file.parent} is in use by {_describe(_owner(seen))}; stop that run first, "
                                    "or give this one another save_ckpt_path")
            if seen:
                self._remove()
        self.content = content
        threading.Thread(target=self._renew, name="lease", daemon=True).start()

    def is_held(self) -> bool:
        """Whether the folder is this process's. Raises OSError as the disk does."""
        seen = self._look() if self.content else None
        return seen is not None and seen[0] == self.content

    def check(self) -> None:
        """Raises UserError when the folder is another run's by now: call it before writing what must not mix."""
        try:
            if self.is_held():
                return
            seen = self._look()
        except OSError as error:
            raise UserError(f"{self.file}: can't be read ({error.strerror}); mend that, then the same command resumes"
                            ) from None
        by = f"is in use by {_describe(_owner(seen))}" if seen else f"has lost its {LEASE}"
        raise UserError(f"{self.file.parent} {by}: this run stood still for a while, or somebody removed the file; it "
                        "stops here and writes nothing more")

    def give_back(self) -> None:
        self.ended.set()
        with contextlib.suppress(OSError):
            if self.is_held():
                self.file.unlink()

    def _create(self, content):
        try:
            with open(self.file, "xb", buffering=0) as file:
                file.write(content)
            return True
        except FileExistsError:
            return False

    def _remove(self):
        left_over = self.file.with_name(f".{LEASE}.{uuid.uuid4().hex}")
        with contextlib.suppress(FileNotFoundError):  # another was faster
            self.file.rename(left_over)
            left_over.unlink()

    def _look(self):
        """(content, time of the last renewal) of the file, which only compare with each other; None where there is
        none. Opening makes NFS ask its server."""
        try:
            with open(self.file, "rb") as file:
                return file.read(), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def _watch(self, seen):
        """What the file is as soon as it differs from what was `seen`, or after SECONDS_OF_SILENCE.

        No clock of another host plays a part: only whether anything changes while we look.
        """
        end = time.monotonic() + SECONDS_OF_SILENCE
        while (now := self._look()) == seen and time.monotonic() < end:
            heart.beat()
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return now

    def _renew(self):
        while not self.ended.wait(SECONDS_BETWEEN_RENEWALS):
            with contextlib.suppress(OSError):  # the next one may succeed
                if self.is_held():
                    os.utime(self.file)


def _this_process():
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": now, "machine": _machine(),
            "started": _start_of(os.getpid()), "job": os.environ.get("SLURM_JOB_ID"),
            "attempt": int(os.environ.get("SLURM_RESTART_COUNT") or 0)}


def _machine():
    """What processes share that see each other under their process ids; None where Linux's /proc is missing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _start_of(pid):
    """When a process started, in a number that tells it from others with the same id; None for one that ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18])
    except OSError:
        return None


def _has_ended(owner):
    """Whether the process is known to have ended. False says nothing."""
    here = _this_process()
    if owner.get("job") and owner["job"] == here["job"] and owner["attempt"] < here["attempt"]:
        return True  # Slurm has started the job again, so this is over; were it not, its lease is lost
    if not owner.get("machine") or owner["machine"] != here["machine"]:
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # another user's
    return _start_of(owner["pid"]) != owner["started"]


def _owner(seen):
    """Who holds the file; {} when it is only just being written, or was cut short by a crash."""
    try:
        return json.loads(seen[0])
    except ValueError:
        return {}


def _describe(owner):
    if not owner:
        return "a run that does not say which"
    job = f" (Slurm job {owner['job']})" if owner["job"] else ""
    return f"the run of process {owner['pid']} on {owner['host']}{job}, begun {owner['since']}"
