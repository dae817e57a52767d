"""Records how far get_dataset.py is and with which settings."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mamba_fsdp.data.reading import BEGINNING, Position
from mamba_fsdp.data.store import WriterState
from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import shown
from mamba_fsdp.storage.formats import DATASET
from mamba_fsdp.storage.typed_json import read_object, write_object

MADE = "dataset.json"
STATE = "state.json"  # of a part
START_AGAIN = "start again with --overwrite, or remove it by hand"


@dataclass
class PartState:
    """The progress of a part. Saved when its stores are flushed, so that another process can resume from it."""

    position: Position = BEGINNING  # in the input
    written: int = 0  # documents that have ended
    is_open: bool = False  # the last document continues
    empty: int = 0  # documents without a token, left out
    stores: dict[str, WriterState] = field(default_factory=dict)
    finished: bool = False
    unreadable: dict[str, str] = field(default_factory=dict)  # {a file that is left out: its fault}


def state_in(folder: Path) -> PartState:
    """Returns how far the part in `folder` is. Raises UserError if its file is damaged."""
    try:
        return read_object(folder / STATE, PartState, START_AGAIN)
    except FileNotFoundError:
        return PartState()


def write_settings(path: Path, settings: dict[str, Any]) -> None:
    write_object(path, {**DATASET.header(), **settings})


def records_settings(path: Path, settings: dict[str, Any]) -> bool:
    """Returns whether the file is there and records these settings. Raises UserError if it records others. Ignores
    settings that an earlier version did not have."""
    try:
        recorded = read_object(path, dict[str, Any], START_AGAIN, DATASET)
    except FileNotFoundError:
        return False
    for name, value in settings.items():
        before = recorded.get(name, value)
        if before != value:
            was = _in_words(before)
            now = _in_words(value)
            if was == now:
                now += " with other paths or times"
            raise UserError(
                f"{path}: made with other settings: {name} was {was} and is {now}; choose another folder, or give "
                "--overwrite"
            )
    return True


def _in_words(value: Any) -> str:
    """Returns a setting, or the input as `describe` gives it: 36 files, 1234 bytes."""
    if not isinstance(value, dict):
        return shown(value)
    return ", ".join(f"{shown(item)} {name}" for name, item in value.items() if name != "digest")
