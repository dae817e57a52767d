"""Translates the settings of other launchers, with the table in other_launchers.yaml. A setting with an equivalent here is
accepted; for any other, the error message names the replacement."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import BOOLEANS, format_value
from mamba_fsdp.settings.train_config import SECTIONS, all_settings, setting_names
from mamba_fsdp.storage.text_yaml import load_yaml

TABLE_FILE = Path(__file__).with_suffix(".yaml")
NULL_VALUES = ("", "none", "null", "~")
WILDCARD = "*"


def batches_to_steps(text: str) -> str:
    """Converts Composer's notation for a duration in batches, such as 100ba, to a number of steps."""
    return text.removesuffix("ba")


def convert_composer_duration(text: str) -> str:
    """Converts a duration of Composer, such as 1006878720tok or 100ba, to tokens or steps. Raises ValueError for
    Composer's other units."""
    if not text.endswith(("ba", "tok")):
        raise ValueError(
            "write steps (as in 100ba) or tokens (as in 2Btok); other units are not supported"
        )
    return batches_to_steps(text)


def seconds_to_minutes(text: str) -> str:
    """Converts a timeout in seconds to minutes. Raises ValueError if `text` is not a number."""
    if not text.replace(".", "", 1).isdigit():
        raise ValueError("expected a number of seconds")
    return f"{float(text) / 60:g}"


CONVERSIONS: dict[str, Callable[[str], str]] = {
    "without_ba": batches_to_steps,
    "composer_duration": convert_composer_duration,
    "seconds": seconds_to_minutes,
}


@dataclass
class Entry:
    """An entry of other_launchers.yaml. The comments in that file explain the fields."""

    names: str
    of: str = ""
    setting: str = ""
    values: Mapping[str, str | None] = field(default_factory=dict)  # None: the value is ignored
    refused: Mapping[str, str] = field(default_factory=dict)
    convert: str = ""
    also: Mapping[str, str] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    why: str = ""

    def __post_init__(self) -> None:
        if self.setting and not self.values:
            self.values = {WILDCARD: WILDCARD}
        self.values = {**dict.fromkeys(self.ignored), **self.values}

    def translate_value(self, text: Any) -> Any:
        """Translates a value of the other launcher.

        Returns the value for `setting`, or None if the value has no effect here. Raises ValueError if the value is
        not supported."""
        if self.convert:
            return CONVERSIONS[self.convert](str(text))
        spellings = {*self.values, *self.refused}
        value = normalize_value(text, spellings)
        if value not in spellings:
            value = WILDCARD
        if value in self.refused:
            raise ValueError(self.refused[value])
        if value not in self.values:
            raise ValueError(self._expected())
        meant = self.values[value]
        if meant != WILDCARD:
            return meant
        if isinstance(text, Mapping):
            raise ValueError("expected one value, not a section with settings")
        return text

    def _expected(self) -> str:
        if self.setting:
            return f"expected {' or '.join([*self.values, *self.refused])}"
        if self.values:
            return f"not possible here: {self.why}"
        return self.why


def translate_setting(entry: Entry, key: str, text: Any) -> tuple[Any, str]:
    """Translates the setting `key`=`text` of another launcher.

    Returns (value, note). The value is for `entry.setting`; it is None if the setting has no effect here. The note for
    the log describes the translation; it is "" if name and value stay the same. Raises UserError, with the replacement, if
    the value is not supported."""
    name = key.rpartition(".")[2]
    written = f"{name}={'...' if isinstance(text, list) else text}"
    try:
        value = entry.translate_value(text)
    except ValueError as error:
        raise UserError(f"{written}: {error}") from None
    if value is None or not entry.setting:
        why = f": {entry.why}" if entry.why else ""
        return None, f"{written} changes nothing here{why}"
    note = ""
    unchanged = str(text).lower() == str(value).lower()
    if not unchanged or entry.setting != name:
        implied = "".join(f", {name}={usual} unless given" for name, usual in entry.also.items())
        note = f"{written} is {entry.setting}={format_value(value)} here{implied}"
    return value, note


def normalize_value(text: Any, choices: Collection[str] = ()) -> str:
    """Returns `text` in the spelling of other_launchers.yaml: in lower case, and with yes, 0 and other spellings of booleans
    replaced by true or false, unless they are in `choices`."""
    small = str(text).lower()
    if small in NULL_VALUES:
        return "none"
    if small in choices or small not in BOOLEANS:
        return small
    return format_value(BOOLEANS[small])


@lru_cache(maxsize=None)
def load_table() -> dict[str, Any]:
    """Returns the content of other_launchers.yaml."""
    return load_yaml(TABLE_FILE, is_own=True)


@lru_cache(maxsize=None)
def load_entries() -> dict[str, Entry]:
    """Returns {name of a setting in another launcher: its entry}."""
    entry_of: dict[str, Entry] = {}
    for fields in load_table()["entries"]:
        entry = Entry(**fields)
        entry_of |= dict.fromkeys(entry.names.split(), entry)
    return entry_of


def find_entry(key: str) -> Entry | None:
    """Returns the entry for the name `key`, with or without a section, or None if there is none. A name that is also a
    setting of this program has an entry only within a section of another launcher."""
    section, _, name = key.rpartition(".")
    is_ours = name in all_settings()
    is_theirs = section in load_table()["sections"].split()
    if key in load_entries():
        return load_entries()[key]
    if is_ours and is_theirs:
        return load_entries().get(name, Entry(name, setting=name))
    if key in setting_names() or (is_theirs or section in SECTIONS) and not is_ours:
        return load_entries().get(name)
    return None
