"""Records the progress and the settings of an import."""

import datetime
import itertools
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mamba_fsdp.data.store import WriterState
from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import format_value
from mamba_fsdp.importing.inputs import InputFile
from mamba_fsdp.importing.reading import BEGINNING, Position
from mamba_fsdp.storage.formats import DATASET
from mamba_fsdp.storage.retry import exists, size_of
from mamba_fsdp.storage.typed_json import read_object, write_object
from mamba_fsdp.text import format_quantity

STATE = "state.json"  # the file with the state of a part
START_AGAIN = "start again with --overwrite, or remove the folder"


@dataclass
class PartState:
    """The progress of one part of an import. It is saved after the stores are flushed, so that another process can resume."""

    HAS_OTHER_FIELDS = True  # earlier versions of this program wrote more fields
    position: Position = BEGINNING  # the position in the input
    # The number of tokens of all documents. It is only counted if some documents are held out.
    tokens: int = 0
    open_tokens: int = 0  # the number of tokens of the last document, or 0 if it has ended
    empty: int = 0  # the number of documents without a token, which are left out
    counts: dict[str, int] = field(default_factory=dict)  # see DocumentBatch.counts
    fault: str = ""  # the problem of the first record that was left out
    stores: dict[str, WriterState] = field(default_factory=dict)
    finished: bool = False
    unreadable: dict[str, str] = field(default_factory=dict)  # {file that was left out: problem}


class Pace:
    """Estimates the share of the files that has been read, and the remaining time."""

    def __init__(self, files: list[InputFile]) -> None:
        self.files = files
        sizes = [size_of(Path(file.name)) for file in files]
        self.ends = list(itertools.accumulate(sizes, initial=0))
        # (time, bytes read) at the first call of `describe`
        self.first: tuple[float, float] | None = None

    def describe(self, number: int) -> str:
        """Formats the share that has been read and the remaining time; "" if the sizes are not known. number: the index of the
        file that is being read."""
        total = self.ends[-1]
        if not total:
            return ""
        size = self.ends[number + 1] - self.ends[number]
        read = self.ends[number] + size * self.files[number].share_read
        moment = time.monotonic()
        if self.first is None:
            self.first = moment, read
        began, read_before = self.first
        text = f", {read / total:.0%} of {format_quantity(total, 'B')}"
        if read > read_before:
            seconds = (total - read) * (moment - began) / (read - read_before)
            text += f", left {datetime.timedelta(seconds=round(seconds))}"
        return text


def read_part_state(folder: Path) -> PartState:
    """Returns the saved progress of the part in `folder`, or an empty PartState if it has none.

    Raises UserError if the file with the progress is damaged."""
    try:
        return read_object(folder / STATE, PartState, START_AGAIN)
    except FileNotFoundError:
        return PartState()


def write_settings(path: Path, settings: dict[str, Any]) -> None:
    write_object(path, {**DATASET.header(), **settings})


def has_settings(
    path: Path,
    settings: dict[str, Any],
    remedy: str = "choose another folder, or give --overwrite",
) -> bool:
    """Returns whether the file at `path` exists. It must contain these settings, except for settings that are missing because
    an earlier version of this program did not have them.

    remedy: the end of the error message. Raises UserError if a setting has another value."""
    try:
        recorded = read_object(path, dict[str, Any], START_AGAIN, DATASET)
    except FileNotFoundError:
        return False
    for name, value in settings.items():
        before = recorded.get(name, value)
        if name == "tokenizer":
            before = resolve_path(before)
        if before != value:
            raise UserError(
                f"{path} was made with other settings: {_difference(name, before, value)}; {remedy}"
            )
    return True


def resolve_path(name: str) -> str:
    """Returns the absolute path, without links, of an existing file or folder. Returns any other name unchanged."""
    return os.path.realpath(name) if exists(name) else name


def _difference(name: str, before: Any, now: Any) -> str:
    """Describes the difference between two values of a setting, or between two descriptions of the input (see `describe`)."""
    if not isinstance(now, dict) or not isinstance(before, dict):
        return f"{name} was {format_value(before)} and is {format_value(now)}"
    parts = [
        f"{item} was {format_value(before[item])} and is {format_value(value)}"
        for item, value in now.items()
        if item != "digest" and before.get(item, value) != value
    ]
    return f"{name}: {', '.join(parts) or 'the names or times of some of its files have changed'}"
