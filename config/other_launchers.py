"""Looks up what users of other launchers type, in other_launchers.yaml. Where the meaning is the same, their name works;
where it is not, the answer names what does it here."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from config.fields import BOOLEANS, shown
from config.text_yaml import load_yaml
from mamba_fsdp.errors import UserError

FILE = Path(__file__).with_suffix(".yaml")
NONE = ("", "none", "null", "~")
ANY = "*"
Beside = Mapping[str, Any]  # all that was given together with a word


def without_ba(text: Any, _beside: Beside) -> str:
    """Composer's 100ba (batches) is 100 steps here."""
    return str(text).removesuffix("ba")


def composer_duration(text: Any, beside: Beside) -> str:
    """Composer's 1006878720tok or 100ba. Raises ValueError for its other units."""
    if not str(text).endswith(("ba", "tok")):
        raise ValueError(
            "epochs and the like are no unit of it here; write steps (as in 100ba) or tokens (2Btok)"
        )
    return without_ba(text, beside)


def seconds(text: Any, _beside: Beside) -> str:
    """A timeout in seconds, as our minutes. Raises ValueError for text that is no number."""
    if not str(text).replace(".", "", 1).isdigit():
        raise ValueError("expected a number of seconds")
    return f"{float(text) / 60:g}"


def composer_paths(_text: Any, beside: Beside) -> dict[str, Any]:
    """text_paths and code_paths, lists of {path, weight, order}, as the datasets of one folder. Raises ValueError."""
    entries: list[Any] = []
    for key, value in beside.items():
        if key.rpartition(".")[2] in ("text_paths", "code_paths") and isinstance(value, list):
            entries += value
    if not entries or not all(isinstance(entry, dict) and entry.get("path") for entry in entries):
        raise ValueError("expected a list of `path: FILE`, each with its weight")
    if any(str(entry.get("order", 0)) != "0" for entry in entries):
        raise ValueError("an order is none here: the sources are mixed from start to end")
    paths = [entry["path"] for entry in entries]
    if len(paths) == 1:
        return {"dataset_path": paths[0]}
    folder = os.path.commonpath([os.path.dirname(path) for path in paths])
    found = {"dataset_path": folder, "datasets": [os.path.relpath(path, folder) for path in paths]}
    weights = [entry["weight"] for entry in entries if entry.get("weight")]
    if weights:
        found["weights"] = weights
    return found


CONVERSIONS: dict[str, Callable[[Any, Beside], Any]] = {
    "without_ba": without_ba,
    "composer_duration": composer_duration,
    "composer_paths": composer_paths,
    "seconds": seconds,
}


@dataclass(frozen=True)
class Entry:
    """An entry of the file, which says what its fields are."""

    words: list[str]
    launchers: list[str]
    settings: list[str]
    values: dict[str, str | None]  # None changes nothing
    refused: dict[str, str]
    convert: str
    usual: list[str]  # not empty for what is a setting of earlier versions
    why: str

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "Entry":
        settings = fields.get("is", "").split()
        ignored = fields.get("ignored", [])
        values = dict.fromkeys([ANY] if ignored == "any" else ignored)
        values |= fields.get("values", {ANY: ANY} if settings else {})
        return cls(
            words=fields["words"].split(),
            launchers=fields["of"].split(),
            settings=settings,
            values=values,
            refused=fields.get("refused", {}),
            convert=fields.get("convert", ""),
            usual=fields.get("usual", []),
            why=fields.get("why", ""),
        )

    def translate(self, text: Any, beside: Beside) -> dict[str, Any]:
        """{setting: value}; empty where `text` changes nothing here. Raises ValueError for what can't be had."""
        if self.convert:
            value = CONVERSIONS[self.convert](text, beside)
            return value if isinstance(value, dict) else dict.fromkeys(self.settings, value)
        known = {**self.values, **self.refused}
        value = plain(text, known)
        if value not in known:
            value = ANY
        if value in self.refused:
            raise ValueError(self.refused[value])
        if value not in self.values:
            raise ValueError(self._expected())
        ours = self.values[value]
        if ours is None:
            return {}
        if ours == ANY and isinstance(text, Mapping):
            raise ValueError("expected a value, not settings")
        return dict.fromkeys(self.settings, text if ours == ANY else ours)

    def _expected(self) -> str:
        if self.usual:
            return f"no longer a setting; {self.why}"
        if self.settings:
            return f"expected {' or '.join([*self.values, *self.refused])}"
        return f"there is none here: {self.why}" if self.values else self.why


class Meaning(NamedTuple):
    """What a word and its value are here."""

    settings: dict[str, Any]  # ours, as text
    note: str = ""  # for the log; "" where theirs and ours are the same
    off: bool = False  # it only says what is not, as fp16=false beside bf16=true


def meaning(entry: Entry, key: str, text: Any, beside: Beside) -> Meaning:
    """What `key`=`text` is here. Raises UserError, with what does it here."""
    name = key.rpartition(".")[2]
    said = f"{name}={'...' if isinstance(text, list) else text}"
    try:
        settings = entry.translate(text, beside)
    except ValueError as error:
        raise UserError(f"{said}: {error}") from None
    if not settings:
        return Meaning({}, f"{said} changes nothing here{': ' if entry.why else ''}{entry.why}")
    off = plain(text) in ("none", "false")
    why = f"; {entry.why}" if entry.why else ""
    first, value = next(iter(settings.items()))
    if len(settings) > 1 or str(text).lower() != str(value).lower():
        ours = " ".join(f"{setting}={shown(value)}" for setting, value in settings.items())
        return Meaning(settings, f"{said} is {ours}{why or ' here'}", off)
    return Meaning(settings, "" if name == first else f"{name} is {first} here{why}", off)


def plain(text: Any, known: Collection[str] = ()) -> str:
    """`text` as the file writes values: in small letters, yes, 0 and the like as true or false unless `known`."""
    small = str(text).lower()
    if small in NONE:
        return "none"
    if small in known or small not in BOOLEANS:
        return small
    return shown(BOOLEANS[small])


@lru_cache(maxsize=None)
def content() -> dict[str, Any]:
    return load_yaml(FILE)


@lru_cache(maxsize=None)
def entries() -> dict[str, Entry]:
    """{word: its entry}."""
    found = {}
    for fields in content()["words"]:
        entry = Entry.read(fields)
        found |= dict.fromkeys(entry.words, entry)
    return found


def find(
    key: str, own: str | None, sections: Collection[str], settings: Collection[str]
) -> Entry | None:
    """The entry of the name `key`, with its section or without.

    own: our setting of that name, if there is one. sections, settings: the names of ours. A name of ours counts only
    below its own section, or below one that is none of ours.
    """
    section, _, leaf = key.rpartition(".")
    if key in entries() or own:
        return entries().get(key) or entries().get(str(own))
    if section in content()["sections"].split():
        same = Entry.read({"words": leaf, "of": "", "is": leaf}) if leaf in settings else None
        return entries().get(leaf, same)
    if section in sections and leaf not in settings:
        return entries().get(leaf)
    return None


def synonyms() -> dict[str, list[str]]:
    """{our setting: the words that mean just the same}."""
    found: dict[str, list[str]] = {}
    for word, entry in entries().items():
        unchanged = entry.values == {ANY: ANY} and not entry.refused and not entry.convert
        if unchanged and len(entry.settings) == 1 and "." not in word:
            found.setdefault(entry.settings[0], []).append(word)
    return found


def launcher_of(keys: Collection[str]) -> str | None:
    """The launcher that knows most of these names, and two at least more than are ours."""
    leaves = {key.rpartition(".")[2] for key in keys}
    counts = dict.fromkeys(content()["launchers"], 0)
    for word, entry in entries().items():
        if word in leaves and [word] != entry.settings and not entry.usual:
            for launcher in counts.keys() & set(entry.launchers):
                counts[launcher] += 1
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] >= 2 else None
