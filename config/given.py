"""Reads what one place, the command line or a file, gives: in our names or in words of other
launchers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from config import other_launchers
from config.fields import near_name, read_field, shown
from config.train_config import SECTIONS, all_settings, setting_names
from mamba_fsdp.errors import UserError


class Word(NamedTuple):
    """The word by which a setting was given."""

    key: str
    is_ours: bool  # not another launcher's
    is_weak: bool  # it gives way to another word for the same setting


class Given:
    """The settings that one place gives. Mistakes are collected, so that all of them can be told at
    once."""

    def __init__(self, words: Mapping[str, Any], where: str, of_run: bool = False) -> None:
        """words: {name: text, or what YAML has there}. where: as in "on the command line". of_run:
        an earlier run wrote it, so that what is retired is no mistake of the user's."""
        self.words = words
        self.where = where
        self.of_run = of_run
        self.values: dict[str, Any] = {}  # by the names of our settings
        self.given_as: dict[str, Word] = {}  # by the same
        self.notes: dict[str, str] = {}  # by the words as given
        self.mistakes: dict[str, str] = {}  # by the same
        for key, text in words.items():
            try:
                self._read(key, text.strip() if isinstance(text, str) else text)
            except UserError as error:
                self.mistakes[key] = str(error)

    def theirs(self) -> set[str]:
        """The settings that were given in words of other launchers."""
        return {name for name, word in self.given_as.items() if not word.is_ours}

    def _read(self, key: str, text: Any) -> None:
        own = setting_names().get(key)
        entry = other_launchers.find(key, own, SECTIONS, all_settings())
        leaf = key.rpartition(".")[2]
        if entry is not None and entry.usual and self.of_run:
            value = shown(text)
            if other_launchers.plain(value) not in entry.usual:
                note = f"{leaf}={value} is no longer a setting and ignored; {entry.why}"
                self.notes[key] = note
        elif entry is not None:
            self._read_entry(key, text, entry, is_ours=own is not None)
        elif own is not None:
            self._set(own, text, Word(key, is_ours=True, is_weak=False))
        else:
            # The suggestion looks past a wrong section; the setting does not.
            hint = near_name(leaf, ["config", *all_settings()], "training.py --help lists them")
            raise UserError(f"{key}: there is no such setting ({self.where}); {hint}")

    def _read_entry(self, key: str, text: Any, entry: other_launchers.Entry, is_ours: bool) -> None:
        if self.of_run and isinstance(text, list):
            for value in set(text) & entry.refused.keys():
                self.notes[f"{key} {value}"] = f"{key}={value} is ignored: {entry.refused[value]}"
            text = [value for value in text if value not in entry.refused]
        meaning = other_launchers.meaning(entry, key, text)
        if meaning.note:
            self.notes[key] = meaning.note
        for place, (name, value) in enumerate(meaning.settings.items()):
            is_weak = not is_ours and (place > 0 or meaning.off)
            self._set(name, value, Word(key, is_ours, is_weak))

    def _set(self, name: str, text: Any, word: Word) -> None:
        """Sets `name`, which an earlier word may have set. Raises UserError where the two
        contradict each other."""
        value = read_field(name, all_settings()[name][1], text, f" ({self.where})")
        before = self.given_as.get(name)
        if before is None:
            self.values[name] = value
            self.given_as[name] = word
            return
        agree = _agree(value, self.values[name])
        if (before.is_ours and word.is_ours) or (not agree and before.is_weak == word.is_weak):
            raise UserError(
                f"{name}: given twice {self.where} (as {before.key} and {word.key}); give it once"
            )
        loser = word
        if before.is_weak:
            loser = before
            self.values[name] = value
            self.given_as[name] = word
        if not agree and loser.key not in {other.key for other in self.given_as.values()}:
            self.notes.pop(loser.key, None)


def _agree(value: Any, before: Any) -> bool:
    """Whether a value given again says nothing else than the one `before`; of a list it may be a
    part."""
    if isinstance(value, list) and isinstance(before, list):
        return set(value) <= set(before)
    return value == before
