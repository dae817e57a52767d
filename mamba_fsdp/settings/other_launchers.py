"""Looks up the words of other launchers in other_launchers.yaml. A word that means the same as a
setting here works as one; for any other word, the message names the replacement."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import BOOLEANS, shown
from mamba_fsdp.settings.train_config import SECTIONS, all_settings, setting_names
from mamba_fsdp.storage.text_yaml import load_yaml

FILE = Path(__file__).with_suffix(".yaml")
NONE = ("", "none", "null", "~")
ANY = "*"


def without_ba(text: str) -> str:
    """Returns Composer's 100ba (batches) as 100 steps."""
    return text.removesuffix("ba")


def composer_duration(text: str) -> str:
    """Returns Composer's 1006878720tok or 100ba as tokens or steps. Raises ValueError for its other
    units."""
    if not text.endswith(("ba", "tok")):
        raise ValueError("write steps (as in 100ba) or tokens (2Btok); there is no other unit here")
    return without_ba(text)


def seconds(text: str) -> str:
    """Returns a timeout in seconds converted to minutes. Raises ValueError for text that is not a
    number."""
    if not text.replace(".", "", 1).isdigit():
        raise ValueError("expected a number of seconds")
    return f"{float(text) / 60:g}"


CONVERSIONS: dict[str, Callable[[str], str]] = {
    "without_ba": without_ba,
    "composer_duration": composer_duration,
    "seconds": seconds,
}


@dataclass
class Entry:
    """An entry of other_launchers.yaml; the comments there explain the fields."""

    words: str
    of: str = ""
    setting: str = ""
    values: Mapping[str, str | None] = field(default_factory=dict)  # None: it changes nothing
    refused: Mapping[str, str] = field(default_factory=dict)
    convert: str = ""
    also: Mapping[str, str] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    why: str = ""

    def __post_init__(self) -> None:
        if self.setting and not self.values:
            self.values = {ANY: ANY}
        self.values = {**dict.fromkeys(self.ignored), **self.values}

    def translate(self, text: Any) -> Any:
        """Returns the value that `text` gives to `setting`, or None if it changes nothing. Raises
        ValueError for a value that is not possible here."""
        if self.convert:
            return CONVERSIONS[self.convert](str(text))
        spellings = {*self.values, *self.refused}
        value = plain(text, spellings)
        if value not in spellings:
            value = ANY
        if value in self.refused:
            raise ValueError(self.refused[value])
        if value not in self.values:
            raise ValueError(self._expected())
        meant = self.values[value]
        if meant != ANY:
            return meant
        if isinstance(text, Mapping):
            raise ValueError("expected a value, not settings")
        return text

    def _expected(self) -> str:
        if self.setting:
            return f"expected {' or '.join([*self.values, *self.refused])}"
        if self.values:
            return f"not possible here: {self.why}"
        return self.why


def meaning(entry: Entry, key: str, text: Any) -> tuple[Any, str]:
    """Returns (value, note) for `key`=`text`: the value is text for `entry.setting`, or None if it changes nothing; the
    note is for the log, or "" if name and value are the same here. Raises UserError, which names the replacement."""
    name = key.rpartition(".")[2]
    written = f"{name}={'...' if isinstance(text, list) else text}"
    try:
        value = entry.translate(text)
    except ValueError as error:
        raise UserError(f"{written}: {error}") from None
    if value is None or not entry.setting:
        why = f": {entry.why}" if entry.why else ""
        return None, f"{written} changes nothing here{why}"
    note = ""
    unchanged = str(text).lower() == str(value).lower()
    if not unchanged or entry.setting != name:
        implied = "".join(f", {name}={usual} unless given" for name, usual in entry.also.items())
        note = f"{written} is {entry.setting}={shown(value)} here{implied}"
    return value, note


def plain(text: Any, choices: Collection[str] = ()) -> str:
    """Returns `text` as other_launchers.yaml writes values: in lower case, with yes, 0 and the like
    as true or false unless they are in `choices`."""
    small = str(text).lower()
    if small in NONE:
        return "none"
    if small in choices or small not in BOOLEANS:
        return small
    return shown(BOOLEANS[small])


@lru_cache(maxsize=None)
def content() -> dict[str, Any]:
    """Returns the content of other_launchers.yaml."""
    return load_yaml(FILE, is_own=True)


@lru_cache(maxsize=None)
def entries() -> dict[str, Entry]:
    """Returns {word: its entry}."""
    entry_of: dict[str, Entry] = {}
    for fields in content()["words"]:
        entry = Entry(**fields)
        entry_of |= dict.fromkeys(entry.words.split(), entry)
    return entry_of


def find(key: str) -> Entry | None:
    """Returns the entry of the name `key`, with or without a section; None if there is no entry. A
    name of ours has an entry only below a section of other launchers."""
    section, _, leaf = key.rpartition(".")
    is_ours = leaf in all_settings()
    is_theirs = section in content()["sections"].split()
    if key in entries():
        return entries()[key]
    if is_ours and is_theirs:
        return entries().get(leaf, Entry(leaf, setting=leaf))
    if key in setting_names() or (is_theirs or section in SECTIONS) and not is_ours:
        return entries().get(leaf)
    return None
