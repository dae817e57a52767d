"""Records how far get_dataset.py is and with which settings."""

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
START_AGAIN = "start again with --overwrite, or remove it by hand"


@dataclass
class PartState:
    """The progress of a part. Saved when its stores are flushed, so that another process can resume from it."""

    HAS_OTHER_FIELDS = True  # earlier versions had some
    position: Position = BEGINNING  # the position in the input
    tokens: int = 0  # the tokens of all documents, counted if some are held out
    open_tokens: int = 0  # the tokens of the last document, if it continues
    empty: int = 0  # documents without a token, left out
    counts: dict[str, int] = field(default_factory=dict)  # see reading.py
    fault: str = ""  # the fault of the first record that is left out
    stores: dict[str, WriterState] = field(default_factory=dict)
    finished: bool = False
    unreadable: dict[str, str] = field(default_factory=dict)  # {a file that is left out: its fault}


class Pace:
    """Estimates which share of the files is read, and how long the rest will take."""

    def __init__(self, files: list[InputFile]) -> None:
        self.files = files
        sizes = [size_of(Path(file.name)) for file in files]
        self.ends = list(itertools.accumulate(sizes, initial=0))
        self.first: tuple[float, float] | None = (
            None  # the first call's moment, and bytes read then
        )

    def describe(self, number: int) -> str:
        """Returns the share that is read, and the time left, while file `number` is being read; "" if no sizes are
        known."""
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


def state_in(folder: Path) -> PartState:
    """Returns how far the part in `folder` is. Raises UserError if its file is damaged."""
    try:
        return read_object(folder / STATE, PartState, START_AGAIN)
    except FileNotFoundError:
        return PartState()


def write_settings(path: Path, settings: dict[str, Any]) -> None:
    write_object(path, {**DATASET.header(), **settings})


def records_settings(
    path: Path,
    settings: dict[str, Any],
    remedy: str = "choose another folder, or give --overwrite",
) -> bool:
    """Returns whether the file exists and records these settings. Raises UserError with `remedy` at its end if it records
    others. Ignores settings that an earlier version did not have."""
    try:
        recorded = read_object(path, dict[str, Any], START_AGAIN, DATASET)
    except FileNotFoundError:
        return False
    for name, value in settings.items():
        before = recorded.get(name, value)
        if name == "tokenizer":
            before = resolved(before)
        if before != value:
            raise UserError(
                f"{path}: made with other settings: {_difference(name, before, value)}; {remedy}"
            )
    return True


def resolved(name: str) -> str:
    """Returns the path of a file or folder in its one spelling; another name as it is."""
    return os.path.realpath(name) if exists(name) else name


def _difference(name: str, before: Any, now: Any) -> str:
    """Describes how a setting differs, or the input as `describe` gives it."""
    if not isinstance(now, dict) or not isinstance(before, dict):
        return f"{name} was {format_value(before)} and is {format_value(now)}"
    parts = [
        f"{item} was {format_value(before[item])} and is {format_value(value)}"
        for item, value in now.items()
        if item != "digest" and before.get(item, value) != value
    ]
    return f"{name}: {', '.join(parts) or 'some of its files have other names or times'}"
