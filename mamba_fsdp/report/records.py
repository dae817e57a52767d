"""What rank 0 writes about a run: files of JSON lines such as metrics.jsonl, one object a line, and status.json."""

import contextlib
import errno
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from mamba_fsdp.errors import LostError, UserError
from mamba_fsdp.lease import Lease
from mamba_fsdp.run_layout import EVENTS, LEASE, METRICS, STATUS, newest_step
from mamba_fsdp.storage import exists, parse_object, retry_io, timestamp, write_for_user

T = TypeVar("T")
LARGEST = 1 << 63  # an integer that others read


class Log:
    """Appends to a file of JSON lines, each with its "step", after dropping what was written after `step`.

    check: called before each write, with how retry_io to try; raises UserError where there must be none. `failing`:
    whether the last attempt failed: what it was to write waits in memory for the next one.
    """

    def __init__(
        self, path: Path, step: int, check: Callable[[Callable], object] | None = None
    ) -> None:
        self.path = path
        self.check = check
        self.waiting = b""
        self.failing = False
        self.size = 0
        if step:
            self.size = retry_io(lambda: _size_up_to(path, step), path)
        self.sync()

    def write(self, *entries: dict) -> None:
        """Raises LostError where others write there. Where the disk refuses, it is told once and `sync` will raise."""
        for entry in entries:
            self.waiting += _line(entry).encode()
        try:
            self._append()
        except LostError:
            raise
        except (OSError, UserError) as error:
            if not self.failing:
                print(
                    f"warning: {self.path}: can't be written ({getattr(error, 'strerror', error)}); its lines wait "
                    "in memory",
                    file=sys.stderr,
                    flush=True,
                )
            self.failing = True

    def sync(self) -> None:
        """Returns when all that was written is on the disk. Raises UserError where that fails, a StorageError after
        patient trying."""
        try:
            self._append(sync=True)
        except OSError as error:
            raise UserError(
                f"{self.path}: can't be written ({error.strerror}); "
                "fix that, then the same command resumes"
            ) from None

    def _append(self, *, sync: bool = False) -> None:
        def attempt() -> int:
            # Opened each time: file servers tell at the close what they could not write, and forget files.
            with open(self.path, "ab", buffering=0) as file:
                end = file.tell()
                if end != self.size:
                    # An attempt that failed has left something; or somebody has cut the file short, which is never
                    # made longer again; or another run has the file since the check, and keeps it as it is.
                    if self.check:
                        self.check(trying)
                    end = min(end, self.size)
                    file.truncate(end)
                if file.write(self.waiting) < len(self.waiting):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if sync:
                    os.fsync(file.fileno())
                return end + len(self.waiting)

        trying = _try_once if self.failing else retry_io
        if self.check:
            self.check(trying)
        self.size = trying(attempt, self.path)
        self.waiting = b""
        self.failing = False


def _try_once(action: Callable[[], T], what: Path) -> T:
    return action()


def _line(entry: dict) -> str:
    # JSON has no NaN: a loss that is not finite is written as null.
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in entry.items()
    }
    return json.dumps(finite) + "\n"


def read(path: Path) -> list[dict]:
    """Returns the objects of a file of JSON lines, see `entries`. Raises UserError where it can't be read."""
    try:
        return retry_io(lambda: [entry for entry, _ in entries(path)], path)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from None


def entries(path: Path) -> Iterator[tuple[dict, int]]:
    """Yields each object of a file of JSON lines, with the bytes up to its end. Lines that are none are skipped,
    with a word on stderr; without, a last one that a crash cut short."""
    if not exists(path):
        return
    end = 0
    is_told = False
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            end += len(line)
            entry = _parse_entry(line)
            if entry is not None:
                yield entry, end
            elif line.endswith(b"\n") and not is_told:
                print(
                    f"warning: {path}: line {number} is not an entry of a run; such lines are skipped",
                    file=sys.stderr,
                )
                is_told = True


def _parse_entry(line: bytes) -> dict | None:
    if not line.endswith(b"\n"):
        return None
    try:
        entry = parse_object(line)
    except ValueError:
        return None
    step = entry.get("step")
    return entry if type(step) is int and 0 <= step < LARGEST else None


def _size_up_to(path: Path, step: int) -> int:
    size = 0
    for entry, end in entries(path):
        if entry["step"] > step:
            break
        size = end
    return size


def numbers_of(entry: dict) -> dict[str, Any]:
    """Returns the numbers of an entry of the metrics but for its step, those of each source as in `source_epochs/code`.
    None for what is not finite."""
    flat: dict[str, Any] = {}
    for name, value in entry.items():
        if isinstance(value, dict):
            for part, number in value.items():
                flat[f"{name}/{part}"] = number
        elif name != "step":
            flat[name] = value
    return {name: value for name, value in flat.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) < LARGEST
    return value is None or type(value) is float


def was_validated(run_folder: Path, step: int) -> bool:
    """Whether the metrics hold a validation of the model after `step`."""
    return any(
        entry["step"] == step and "val_loss" in entry for entry in read(run_folder / METRICS)
    )


def write_status(
    run_folder: Path,
    status: str,
    step: int,
    reason: str = "",
    write: Callable[[Path, str], object] = write_for_user,
) -> None:
    """Writes status.json, and an event unless the run goes on. status: running, stopped, finished or failed. Raises
    UserError where it can't."""
    content: dict[str, Any] = {
        "status": status,
        "step": step,
        "reason": reason,
        "time": timestamp(),
    }
    write(run_folder / STATUS, json.dumps(content, indent=1) + "\n")
    if status != "running":
        add_event(run_folder, status, step, reason=reason)


def read_status(run_folder: Path) -> dict[str, Any]:
    """Returns the content of status.json, or {} where there is none. A run that could not write how it ended, after kill
    -9 or on a full disk, is `failed`, as far as that can be known."""
    status: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, UserError):
        # Looked at first: a run says how it ended, and gives its lease back then.
        holder = Lease(run_folder / LEASE).look()
        status = parse_object((run_folder / STATUS).read_text())
        if status.get("status") == "running" and (not holder or holder.has_ended()):
            reason = (
                f"{holder or 'its process'} exited without a status: killed, or its disk was full"
            )
            status |= {"status": "failed", "step": newest_step(run_folder), "reason": reason}
    return status


def correct_status(run_folder: Path) -> dict[str, Any]:
    """Returns what read_status returns, and writes it for a run that could not write how it ended."""
    status = read_status(run_folder)
    with contextlib.suppress(OSError, ValueError, UserError):
        written = parse_object((run_folder / STATUS).read_text())
        if written.get("status") == "running" and status["status"] == "failed":
            write_status(run_folder, "failed", status["step"], status["reason"])
    return status


def add_event(run_folder: Path, event: str, step: int, **facts: object) -> None:
    """Adds a line to events.jsonl: what happened after `step`, when (UTC), and `facts` of it. The caller holds the run
    folder. Where the disk refuses, the line is lost: no reason to stop a run."""
    line = _line({"time": timestamp(), "event": event, "step": step, **facts}).encode()
    with contextlib.suppress(OSError), open(run_folder / EVENTS, "a+b", buffering=0) as file:
        file.seek(max(0, file.tell() - 1))
        if file.read(1) not in (b"", b"\n"):  # after a line that a crash cut short
            line = b"\n" + line
        file.write(line)


def read_events(run_folder: Path) -> list[dict]:
    """The events of a run, oldest first; [] where an older version made the run. Raises UserError."""
    return read(run_folder / EVENTS)
