"""Reads what one place, the command line or a file, gives: in our names or in words of other
launchers."""

from collections.abc import Mapping
from typing import Any

from mamba_fsdp.errors import UserError, near_name
from mamba_fsdp.settings import other_launchers
from mamba_fsdp.settings.fields import read_field
from mamba_fsdp.settings.train_config import all_settings, setting_names


class Given:
    """The settings that one place gives. Mistakes are collected, so that all of them can be told at
    once."""

    def __init__(self, words: Mapping[str, Any], where: str, is_of_run: bool = False) -> None:
        """words: {name: text, or what YAML has there}. where: as in "on the command line".
        is_of_run: whether a run wrote them, as its config.yaml."""
        self.where = where
        self.is_of_run = is_of_run
        self.values: dict[str, Any] = {}  # by the names of our settings
        # The same, of words that were given, unless others say it.
        self.implied: dict[str, Any] = {}
        self.given_as: dict[str, str] = {}  # by the same: the word for it
        self.notes: dict[str, str] = {}  # by the words as given
        self.mistakes: dict[str, str] = {}  # by the same
        for key, text in words.items():
            try:
                self._read(key, text.strip() if isinstance(text, str) else text)
            except UserError as error:
                self.mistakes[key] = str(error)

    def theirs(self) -> set[str]:
        """The settings that were given in words of other launchers."""
        return {name for name, word in self.given_as.items() if word not in setting_names()}

    def _read(self, key: str, text: Any) -> None:
        own = setting_names().get(key)
        entry = other_launchers.find(key)
        if entry is not None:
            self._read_entry(key, text, entry)
        elif own is not None:
            self._set(own, text, key)
        else:
            # The suggestion looks past a wrong section; the setting does not.
            leaf = key.rpartition(".")[2]
            known = ["config", *all_settings(), *other_launchers.entries()]
            hint = near_name(leaf, known, "--help=all lists them")
            raise UserError(f"{key}: there is no such setting ({self.where}); {hint}")

    def _read_entry(self, key: str, text: Any, entry: other_launchers.Entry) -> None:
        meant, note = other_launchers.meaning(entry, key, text)
        if note:
            self.notes[key] = note
        if meant is not None:
            self._set(entry.setting, meant, key)
            for name, value in entry.also.items():
                self.implied[name] = read_field(name, all_settings()[name][1], value)

    def _set(self, name: str, text: Any, key: str) -> None:
        """Sets `name`, given by the word `key`. Raises UserError where an earlier word for it says
        something else, or both are ours."""
        value = read_field(name, all_settings()[name][1], text, f" ({self.where})")
        if name not in self.given_as:
            self.values[name] = value
            self.given_as[name] = key
            return
        earlier = self.given_as[name]
        both_ours = {key, earlier} <= setting_names().keys()
        agrees = value == self.values[name]
        if isinstance(value, list):  # of which it may be a part
            agrees = set(value) <= set(self.values[name])
        if both_ours or not agrees:
            raise UserError(
                f"{name}: given twice {self.where} (as {earlier} and {key}); give it once"
            )
