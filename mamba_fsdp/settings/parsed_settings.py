"""Parses the settings on the command line or in a file, with the names of this program or of other launchers."""

from collections.abc import Mapping
from typing import Any

from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import read_field
from mamba_fsdp.settings import other_launchers
from mamba_fsdp.settings.recipes import PUBLISHED
from mamba_fsdp.settings.train_config import all_settings, setting_names
from mamba_fsdp.text import suggest_name


class ParsedSettings:
    """The settings from one place: the command line or a file. It collects the mistakes, so that all of them can be
    reported at once."""

    def __init__(self, content: Mapping[str, Any], where: str, is_of_run: bool = False) -> None:
        """Parses the settings.

        content: {name: text, or a list or mapping from YAML}. where: describes the place in messages, for example "on the
        command line". is_of_run: whether the file is a config.yaml that a run wrote."""
        self.where = where
        self.is_of_run = is_of_run
        self.values: dict[str, Any] = {}  # {setting: its value}
        # {setting: the value that it has by default in the launcher that another setting was written for}
        self.alias_defaults: dict[str, Any] = {}
        self.names: dict[str, str] = {}  # {setting: the name that the user wrote for it}
        self.notes: list[str] = []
        self.mistakes: list[str] = []
        for word, text in content.items():
            try:
                self._read(word, text.strip() if isinstance(text, str) else text)
            except UserError as error:
                self.mistakes.append(str(error))

    def translated_settings(self) -> set[str]:
        """Returns the settings that were given by their names in other launchers."""
        return {name for name, word in self.names.items() if word not in setting_names()}

    def _read(self, word: str, text: Any) -> None:
        name = setting_names().get(word)
        entry = other_launchers.find_entry(word)
        if entry is not None:
            self._read_entry(word, text, entry)
        elif name is not None:
            self._set(name, text, word)
        else:
            # The suggestion ignores the section, because only the section could be wrong.
            short_name = word.rpartition(".")[2]
            entries = other_launchers.load_entries()
            elsewhere = {name: entry.setting or name for name, entry in entries.items()}
            names = ["config", *all_settings()]
            hint = suggest_name(short_name, names, "--help=all lists them", elsewhere=elsewhere)
            raise UserError(f"{word}: there is no such setting ({self.where}); {hint}")

    def _read_entry(self, word: str, text: Any, entry: other_launchers.Entry) -> None:
        if word not in setting_names():
            self.alias_defaults["recipe"] = PUBLISHED  # the other launcher trains with AdamW
        value, note = other_launchers.translate_setting(entry, word, text)
        if note:
            self.notes.append(note)
        if value is not None:
            self._set(entry.setting, value, word)
            for name, implied in entry.also.items():
                self.alias_defaults[name] = read_field(name, all_settings()[name][1], implied)

    def _set(self, name: str, text: Any, word: str) -> None:
        """Sets the setting `name`.

        Raises UserError for an invalid value. Also raises UserError if the setting was given before, unless one of the
        two names comes from another launcher and the values agree."""
        value = read_field(name, all_settings()[name][1], text, f" ({self.where})")
        if name == "seq_length" and str(text).lower().endswith("k"):
            self.notes.append(
                f"seq_length={text} is {value:,}; is {value * 1024 // 1000} meant? Write it in full"
            )
        if name not in self.names:
            self.values[name] = value
            self.names[name] = word
            return
        earlier = self.names[name]
        both_ours = {word, earlier} <= setting_names().keys()
        agrees = value == self.values[name]
        if isinstance(value, list):  # the new list agrees if the earlier one contains it
            agrees = set(value) <= set(self.values[name])
        if both_ours or not agrees:
            raise UserError(
                f"{name}: given twice {self.where} (as {earlier} and {word}); give it once"
            )
