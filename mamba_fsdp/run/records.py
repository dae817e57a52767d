"""Writes and reads the records of a run: status.json, and files of JSON lines such as metrics.jsonl.

Rank 0 writes them.
"""

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
from mamba_fsdp.run.names import EVENTS, LEASE, METRICS, STARTING_REASON, STATUS
from mamba_fsdp.storage.retry import (
    exists,
    open_to_read,
    read_bytes,
    retry_io,
    stat_of,
    storage_error,
    write_for_user,
)
from mamba_fsdp.storage.typed_json import parse_object
from mamba_fsdp.text import utc_timestamp

T = TypeVar("T")
Write = Callable[[Path, str | bytes], object]  # replaces a file, see write_for_user
OTHER_RANK_REASON = "requested on another rank"  # the stop reason if rank 0 did not get the request
END_EVENTS = ("stopped", "finished", "failed")  # the events that end a start
MAX_INTEGER = 1 << 63  # larger integers are ignored, because other programs can't represent them


class Log:
    """A file of JSON lines. Entries are appended to it. Each entry has the key "step".

    The constructor replaces the file by a copy without the entries after `step`, because the run repeats these steps.

    Each write opens the file before it checks `lease`. A process that is suspended after the check can lose the lease
    meanwhile. Its write then goes to the old file, which the next holder of the lease has already replaced, so the write
    has no effect.

    failing: whether the last write failed. Entries of a failed write stay in memory and are written with the next ones.
    """

    def __init__(self, path: Path, step: int, lease: Lease) -> None:
        self.path = path
        self.lease = lease
        self.pending = b""
        self.failing = False
        kept = b""
        if step:
            kept = retry_io(_lines_up_to, path, path, step)
        self.size = len(kept)
        lease.write(path, kept)

    def write(self, *entries: dict) -> None:
        """Appends entries. If the disk fails, prints a warning once and keeps the entries in memory.

        Raises LeaseLostError if another process has acquired the lease.
        """
        for entry in entries:
            self.buffer(entry)
        try:
            self._append()
        except LeaseLostError:
            raise
        except (OSError, UserError) as error:
            if not self.failing:
                print(
                    f"warning: {self.path}: can't be written ({getattr(error, 'strerror', error)}); its lines stay "
                    "in memory until the next attempt",
                    file=sys.stderr,
                    flush=True,
                )
            self.failing = True

    def buffer(self, entry: dict) -> None:
        """Keeps an entry in memory. The next call of `write` or `sync` appends it to the file."""
        self.pending += _format_line(entry).encode()

    def sync(self) -> None:
        """Waits until all entries are on the disk.

        Raises UserError if that fails, StorageError for a transient error.
        """
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
            # Open the file each time: file servers report failed writes when the file is closed, and a restarted server
            # no longer knows which files were open.
            with open(self.path, "ab", buffering=0) as file:
                self.lease.check(trying)
                end = file.tell()
                if end != self.size:
                    # If a failed attempt left part of a line, remove it. If someone truncated the file, do not extend
                    # it again.
                    end = min(end, self.size)
                    file.truncate(end)
                if file.write(self.pending) < len(self.pending):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if sync:
                    os.fsync(file.fileno())
                return end + len(self.pending)

        trying = _call_once if self.failing else retry_io
        self.size = trying(attempt, self.path)
        self.pending = b""
        self.failing = False


def _call_once(action: Callable[[], T], what: Path) -> T:
    return action()


def _format_line(entry: dict) -> str:
    # JSON has no NaN, so a loss that is not finite is written as null.
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in entry.items()
    }
    return json.dumps(finite) + "\n"


def read_entries(path: Path) -> list[dict]:
    """Returns the objects of a file of JSON lines, see `iterate_entries`. Raises UserError if the file can't be read."""
    try:
        return retry_io(lambda: [entry for entry, _ in iterate_entries(path)], path)
    except OSError as error:
        raise UserError(
            f"{path}: can't be read ({error.strerror}); check that it is a file that this user can read"
        ) from None


def iterate_entries(path: Path) -> Iterator[tuple[dict, int]]:
    """Yields (object, offset of the end of its line in bytes) for each entry of a file of JSON lines.

    Invalid lines are skipped, with one warning on stderr. A last line without a line break, as a crash leaves it, is
    skipped without a warning.
    """
    if not exists(path):
        return
    end = 0
    has_warned = False
    with open_to_read(path) as file:
        for number, line in enumerate(file, 1):
            end += len(line)
            entry = _parse_entry(line)
            if entry is not None:
                yield entry, end
            elif line.endswith(b"\n") and not has_warned:
                print(
                    f"warning: {path}: line {number} is not an entry of a run; such lines are skipped",
                    file=sys.stderr,
                )
                has_warned = True


def _parse_entry(line: bytes) -> dict | None:
    if not line.endswith(b"\n"):
        return None
    try:
        entry = parse_object(line)
    except ValueError:
        return None
    step = entry.get("step")
    return entry if type(step) is int and 0 <= step < MAX_INTEGER else None


def _lines_up_to(path: Path, step: int) -> bytes:
    """Returns the content of a file of JSON lines before the first entry after `step`."""
    size = 0
    for entry, end in iterate_entries(path):
        if entry["step"] > step:
            break
        size = end
    return read_bytes(path)[:size] if size else b""


def latest_values(run_folder: Path) -> dict[str, Any]:
    """Returns the latest value of each key in metrics.jsonl."""
    values: dict[str, Any] = {}
    for entry in read_entries(run_folder / METRICS):
        values |= entry
    return values


def flatten_numbers(entry: dict) -> dict[str, Any]:
    """Returns {metric: value} of an entry in metrics.jsonl, without its step.

    If the entry has a value for each data source, the name of the source follows the name of the metric, as in
    `source_epochs/code`. A value that is not finite is None.
    """
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
        return abs(value) < MAX_INTEGER
    return value is None or type(value) is float


def best_validation(entries: Iterable[dict]) -> dict:
    """Returns the metrics entry of the validation with the lowest loss; {} if there is none."""
    validated = [entry for entry in entries if isinstance(entry.get("val_loss"), float)]
    return min(validated, key=lambda entry: entry["val_loss"], default={})


def was_validated(run_folder: Path, step: int) -> bool:
    """Returns whether metrics.jsonl contains a validation of the model after `step`."""
    return any(
        entry["step"] == step and "val_loss" in entry
        for entry in read_entries(run_folder / METRICS)
    )


def write_status(
    run_folder: Path,
    status: str,
    step: int,
    reason: str = "",
    write: Write = write_for_user,
) -> None:
    """Writes status.json and, unless the status is running, adds an event.

    status: running, stopped, finished or failed. write: the function that replaces a file; the holder of the run's
    lease passes `Lease.write`. Raises UserError if the disk fails.
    """
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
    """Returns the content of status.json, or {} if there is none.

    If the file contains the status `running`, but the process has ended, for example after kill -9 or because of a full
    disk, the returned status is `failed`.
    """
    status: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, UserError):
        # Read the lease before the status, because a run writes its last status before it releases the lease. Read it
        # again after the status, because a start acquires the lease before it writes its first status.
        lease = Lease(run_folder / LEASE)
        before = lease.read_snapshot()
        status = parse_object(read_bytes(run_folder / STATUS))
        holder = lease.read_snapshot()
        is_over = not any(
            snapshot and snapshot.is_alive() is not False for snapshot in (before, holder)
        )
        if status.get("status") == "running" and is_over:
            reason = f"{holder or 'the process of the run'} ended without writing its status: it was killed, or the disk was full"
            status |= {"status": "failed", "step": newest_step(run_folder), "reason": reason}
    return status


def repair_status(run_folder: Path, stop_reason: str = "") -> dict[str, Any]:
    """Returns the status, see `read_status`, and corrects status.json if the run ended without writing its status.

    The file stays as it is if another process has acquired the lease. stop_reason: why somebody killed the run on
    purpose. If the run was killed before the first step of this start, nothing was lost, and the status becomes `stopped`
    instead of `failed`.
    """
    status = read_status(run_folder)
    lease = Lease(run_folder / LEASE)
    with contextlib.suppress(OSError, ValueError, UserError), contextlib.closing(lease):
        if status.get("status") == "failed" and lease.try_acquire():
            written = parse_object(read_bytes(run_folder / STATUS))
            if written.get("status") == "running":
                if stop_reason and written.get("reason") == STARTING_REASON:
                    status |= {"status": "stopped", "reason": stop_reason}
                write_status(
                    run_folder, status["status"], status["step"], status["reason"], lease.write
                )
    return status


def add_event(
    run_folder: Path, event: str, step: int, write: Write = write_for_user, **facts: object
) -> None:
    """Adds a line to events.jsonl: the event after `step`, its time (UTC) and its `facts`.

    If the disk fails, the line is lost with a warning, because the run should continue. The small file is written as a
    whole with `write`, so that a process that has lost its lease can't add to it. The holder of the run's lease passes
    `Lease.write`. Raises LeaseLostError if this process has lost the lease.
    """
    line = _format_line({"time": utc_timestamp(), "event": event, "step": step, **facts}).encode()
    path = run_folder / EVENTS
    try:
        content = read_bytes(path) if exists(path) else b""
        if content and not content.endswith(b"\n"):  # a crash truncated the last line
            content += b"\n"
        write(path, content + line)
    except LeaseLostError:
        raise
    except (OSError, UserError) as error:
        print(f"warning: {path}: the event {event!r} is lost: {error}", file=sys.stderr)


def command_seconds(run_folder: Path, until: float) -> float:
    """Returns the total seconds that the commands of a run took before `until`, without the pauses between them.

    until: seconds since the epoch. A command that was killed counts until it wrote its last metrics. Returns 0 if the
    records are incomplete.
    """
    with contextlib.suppress(LookupError, OSError, TypeError, ValueError):
        events = read_events(run_folder)
        moments = [datetime.fromisoformat(event["time"]).timestamp() for event in events]
        kinds = [event["event"] for event in events]
        start = max(number for number, kind in enumerate(kinds) if kind == "started")
        ends = [
            number for number, kind in enumerate(kinds) if kind in END_EVENTS and number > start
        ]
        ended = moments[ends[0]] if ends else stat_of(run_folder / METRICS).st_mtime
        began = moments[start] - events[start]["seconds_to_start"]
        return events[start]["seconds_of_earlier_commands"] + max(0.0, min(ended, until) - began)
    return 0.0


def read_starts(run_folder: Path) -> list[dict]:
    """Returns the events of a run's starts, oldest first. Raises UserError if the file can't be read."""
    return [event for event in read_events(run_folder) if event.get("event") == "started"]


def read_events(run_folder: Path) -> list[dict]:
    """Returns the events of a run, oldest first; [] if there are none. Raises UserError if the file can't be read."""
    return read_entries(run_folder / EVENTS)
