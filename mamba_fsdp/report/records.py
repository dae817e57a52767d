"""What rank 0 writes about a run: metrics.jsonl, one object a line, and status.json."""

import contextlib
import datetime
import errno
import json
import math
import os
from pathlib import Path

from mamba_fsdp.durable import write_atomically
from mamba_fsdp.errors import UserError
from mamba_fsdp.run_layout import METRICS, STATUS
from mamba_fsdp.storage import exists, patiently


class Metrics:
    """Appends to metrics.jsonl. A run that resumes from `step` first drops what an interrupted run wrote after it."""

    def __init__(self, run_folder: Path, step: int) -> None:
        self.path = run_folder / METRICS
        kept = [line for line in read(self.path) if line["step"] <= step] if step else []
        text = "".join(_line(entry) for entry in kept)
        write_atomically(self.path, text)
        self.size = len(text.encode())

    def write(self, entry: dict) -> None:
        """Raises UserError where the disk refuses, a StorageError after patient trying."""
        self._append(_line(entry).encode())

    def sync(self) -> None:
        """Returns when all that was written is on the disk. Raises as `write` does."""
        self._append(b"", sync=True)

    def _append(self, line, *, sync=False):
        def attempt():  # opened each time: file servers tell at the close what they could not write, and forget files
            with open(self.path, "ab", buffering=0) as file:
                if file.tell() != self.size:
                    file.truncate(self.size)
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if sync:
                    os.fsync(file.fileno())

        try:
            patiently(attempt, self.path)
        except OSError as error:
            raise UserError(f"{self.path}: can't be written ({error.strerror}); "
                            "mend that, then the same command resumes") from None
        self.size += len(line)


def _line(entry: dict) -> str:
    # JSON has no NaN: a loss that is not finite is written as null.
    return json.dumps({key: None if isinstance(value, float) and not math.isfinite(value) else value
                       for key, value in entry.items()}) + "\n"


def read(path: Path) -> list[dict]:
    """The objects of a metrics.jsonl, without a last line that a crash cut short. Raises UserError for other damage."""
    lines = patiently(path.read_text, path).splitlines() if exists(path) else []
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise UserError(f"{path}: line {number} is no JSON; move the file away to resume without it") from None
    return entries


def was_validated(run_folder: Path, step: int) -> bool:
    """Whether the metrics hold a validation of the model after `step`."""
    return any(entry["step"] == step and "val_loss" in entry for entry in read(run_folder / METRICS))


def write_status(run_folder: Path, status: str, step: int, reason: str = "") -> None:
    """status: running, stopped, finished or failed. Raises UserError where the disk refuses."""
    path, now = run_folder / STATUS, datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    content = {"status": status, "step": step, "reason": reason, "time": now}
    try:
        write_atomically(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path}: can't be written ({error.strerror})") from None


def read_status(run_folder: Path) -> dict:
    """The content of status.json, or {} where there is none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((run_folder / STATUS).read_text())
    return {}
