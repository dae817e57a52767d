"""Writes and reads rank 0's records of a run: files of JSON lines such as metrics.jsonl, one object per line, and
status.json."""

import contextlib
import errno
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from mamba_fsdp.errors import LeaseLostError, UserError
from mamba_fsdp.run.layout import newest_step
from mamba_fsdp.run.lease import Lease
from mamba_fsdp.run.names import EVENTS, LEASE, METRICS, STATUS
from mamba_fsdp.run.timestamp import utc_timestamp
from mamba_fsdp.storage.patience import (
    exists,
    open_to_read,
    read_bytes,
    retry_io,
    stat_of,
    storage_error,
    write_for_user,
)
from mamba_fsdp.storage.typed_json import parse_object

T = TypeVar("T")
Write = Callable[[Path, str | bytes], object]  # replaces a file, see write_for_user
ELSEWHERE = "requested on another rank"  # the reason of a stop that rank 0 was not asked for
ENDS = ("stopped", "finished", "failed")  # the events that end a start
LARGEST = 1 << 63  # larger integers are not read: other programs can't hold them


class Log:
    """A file of JSON lines, each with its "step", to which entries are appended.

    Making a Log replaces the file by a copy without the entries after `step`. Each write opens the file first and then
    checks `lease`: a process that is suspended after this check, and has lost the lease when it continues, appends to
    the file that its successor has replaced. `failing`: whether the last attempt failed; its lines wait in memory for
    the next attempt.
    """

    def __init__(self, path: Path, step: int, lease: Lease | None = None) -> None:
        self.path = path
        self.lease = lease
        self.waiting = b""
        self.failing = False
        kept = b""
        if step:
            kept = retry_io(lambda: _lines_up_to(path, step), path)
        self.size = len(kept)
        write = lease.write if lease else write_for_user
        write(path, kept)

    def write(self, *entries: dict) -> None:
        """Appends entries. Raises LeaseLostError if another process writes there. If the disk refuses, it prints one
        warning, and `sync` will raise."""
        for entry in entries:
            self.keep(entry)
        try:
            self._append()
        except LeaseLostError:
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

    def keep(self, entry: dict) -> None:
        """Appends an entry with the next call of `write` or `sync`."""
        self.waiting += _line(entry).encode()

    def sync(self) -> None:
        """Returns when all entries are on the disk. Raises UserError if that fails, StorageError for a transient
        error."""
        try:
            self._append(sync=True)
        except OSError as error:
            raise storage_error(
                error,
                f"{self.path}: can't be written ({error.strerror}); "
                "fix that, then the same command resumes",
            ) from None

    def _append(self, *, sync: bool = False) -> None:
        def attempt() -> int:
            # The file is opened each time: file servers report failed writes at the close, and forget open files.
            with open(self.path, "ab", buffering=0) as file:
                if self.lease:
                    self.lease.check(trying)
                end = file.tell()
                if end != self.size:
                    # A failed attempt has left part of a line: remove it. Or the file was cut short: do not make it
                    # longer again.
                    end = min(end, self.size)
                    file.truncate(end)
                if file.write(self.waiting) < len(self.waiting):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if sync:
                    os.fsync(file.fileno())
                return end + len(self.waiting)

        trying = _try_once if self.failing else retry_io
        self.size = trying(attempt, self.path)
        self.waiting = b""
        self.failing = False


def _try_once(action: Callable[[], T], what: Path) -> T:
    return action()


def _line(entry: dict) -> str:
    # JSON has no NaN, so that a loss that is not finite is written as null.
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in entry.items()
    }
    return json.dumps(finite) + "\n"


def read(path: Path) -> list[dict]:
    """Returns the objects of a file of JSON lines, see `entries`. Raises UserError if the file can't be read."""
    try:
        return retry_io(lambda: [entry for entry, _ in entries(path)], path)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from None


def entries(path: Path) -> Iterator[tuple[dict, int]]:
    """Yields (object, bytes up to its end) for each line of a file of JSON lines. Other lines are skipped with a
    warning on stderr; a last line that a crash cut short is skipped without one."""
    if not exists(path):
        return
    end = 0
    is_told = False
    with open_to_read(path) as file:
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


def _lines_up_to(path: Path, step: int) -> bytes:
    """Returns the beginning of a file of JSON lines, up to its first entry after `step`."""
    size = 0
    for entry, end in entries(path):
        if entry["step"] > step:
            break
        size = end
    return read_bytes(path)[:size] if size else b""


def latest(run_folder: Path) -> dict[str, Any]:
    """Returns the latest value of each key of the metrics."""
    values: dict[str, Any] = {}
    for entry in read(run_folder / METRICS):
        values |= entry
    return values


def numbers_of(entry: dict) -> dict[str, Any]:
    """Returns the numbers of a metrics entry, without its step. The numbers of a source are named as in
    `source_epochs/code`; a number that is not finite is None."""
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


def best_validation(entries: Iterable[dict]) -> dict:
    """Returns the metrics entry of the validation with the lowest loss; {} if there is none."""
    validated = [entry for entry in entries if isinstance(entry.get("val_loss"), float)]
    return min(validated, key=lambda entry: entry["val_loss"], default={})


def was_validated(run_folder: Path, step: int) -> bool:
    """Returns whether the metrics hold a validation of the model after `step`."""
    return any(
        entry["step"] == step and "val_loss" in entry for entry in read(run_folder / METRICS)
    )


def write_status(
    run_folder: Path,
    status: str,
    step: int,
    reason: str = "",
    write: Write = write_for_user,
) -> None:
    """Writes status.json and, unless the status is running, an event. status: running, stopped, finished or failed.
    write: a run's own is `Lease.write`. Raises UserError if it can't write."""
    content: dict[str, Any] = {
        "status": status,
        "step": step,
        "reason": reason,
        "time": utc_timestamp(),
    }
    write(run_folder / STATUS, json.dumps(content, indent=1) + "\n")
    if status != "running":
        add_event(run_folder, status, step, write, reason=reason)


def read_status(run_folder: Path) -> dict[str, Any]:
    """Returns the content of status.json, or {} if there is none. The status is `failed` for a run that is known to
    have ended without writing its status, for example after kill -9 or on a full disk."""
    status: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, UserError):
        # Look at the lease first, since a run writes its last status before it gives its lease back; and again after
        # the status, since a start takes its lease before it writes its first status.
        lease = Lease(run_folder / LEASE)
        before = lease.look()
        status = parse_object(read_bytes(run_folder / STATUS))
        holder = lease.look()
        is_over = not any(look and look.is_alive() is not False for look in (before, holder))
        if status.get("status") == "running" and is_over:
            reason = (
                f"{holder or 'its process'} exited without a status: killed, or its disk was full"
            )
            status |= {"status": "failed", "step": newest_step(run_folder), "reason": reason}
    return status


def correct_status(run_folder: Path) -> dict[str, Any]:
    """Returns the status as read_status does, and writes it for a run that ended without writing its status, unless
    another process has taken the lease by then."""
    status = read_status(run_folder)
    lease = Lease(run_folder / LEASE)
    with contextlib.suppress(OSError, ValueError, UserError), contextlib.closing(lease):
        if status.get("status") == "failed" and lease.try_take():
            written = parse_object(read_bytes(run_folder / STATUS))
            if written.get("status") == "running":
                write_status(run_folder, "failed", status["step"], status["reason"], lease.write)
    return status


def add_event(
    run_folder: Path, event: str, step: int, write: Write = write_for_user, **facts: object
) -> None:
    """Adds a line to events.jsonl: the event after `step`, its time (UTC) and its `facts`. If the disk refuses, the line
    is lost, because an event is no reason to stop a run.

    write: a run's own is `Lease.write`. The file, which is small, is written anew, so that nothing can be added by a
    process that has lost its lease. Raises LeaseLostError.
    """
    line = _line({"time": utc_timestamp(), "event": event, "step": step, **facts}).encode()
    path = run_folder / EVENTS
    try:
        content = read_bytes(path) if exists(path) else b""
        if content and not content.endswith(b"\n"):  # a crash has cut the last line short
            content += b"\n"
        write(path, content + line)
    except LeaseLostError:
        raise
    except (OSError, UserError) as error:
        print(f"warning: {path}: the event {event!r} is lost: {error}", file=sys.stderr)


def seconds_of_commands(run_folder: Path, until: float) -> float:
    """Returns how long the commands of a run have run before `until` (seconds since the epoch), without the pauses
    between them, as far as its records tell: one that was killed ran until it wrote its last metrics."""
    with contextlib.suppress(LookupError, OSError, TypeError, ValueError):
        events = read_events(run_folder)
        moments = [datetime.fromisoformat(event["time"]).timestamp() for event in events]
        kinds = [event["event"] for event in events]
        start = max(number for number, kind in enumerate(kinds) if kind == "started")
        ends = [number for number, kind in enumerate(kinds) if kind in ENDS and number > start]
        ended = moments[ends[0]] if ends else stat_of(run_folder / METRICS).st_mtime
        began = moments[start] - events[start]["seconds_to_start"]
        return events[start]["seconds_of_earlier_commands"] + max(0.0, min(ended, until) - began)
    return 0.0


def read_events(run_folder: Path) -> list[dict]:
    """Returns the events of a run, oldest first; [] if an older version made the run. Raises UserError if the file
    can't be read."""
    return read(run_folder / EVENTS)
