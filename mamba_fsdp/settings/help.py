"""Formats help pages. --help shows the most common options, --help=all shows every option, and --help=TOPIC searches them.
The text about an option is the string below its field in the dataclass that defines it."""

import ast
import dataclasses
import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import default, describe_type, format_value
from mamba_fsdp.text import suggest_name

MIN_COLUMNS = 60
MAX_COLUMNS = 100  # longer lines are hard to read
INDENT = 28  # the column where the options' descriptions begin


def help_query(arguments: Sequence[str]) -> str | None:
    """Returns the help query in a command line: "" for the common options, "all", or search terms. Returns None if the command
    line does not ask for help."""
    if list(arguments) == ["help"]:
        return ""
    for place, argument in enumerate(arguments):
        name, _, asked = argument.partition("=")
        if name in ("--help", "-h"):
            following = [word for word in arguments[place + 1 :] if not word.startswith("-")]
            return asked or " ".join(following)
    return None


@dataclass
class Option:
    """An option on a help page."""

    field: dataclasses.Field
    meaning: str
    elsewhere: list[str]  # the option's names in other programs

    def lines(self, is_brief: bool) -> list[str]:
        """Formats the option's name, default and description.

        is_brief: use only the first sentence of the description, and leave out the type, the bounds and the names in
        other programs."""
        text = self.meaning
        if is_brief:
            text = first_sentence(text)
        else:
            text += f" ({describe_type(self.field)})"
            if self.elsewhere:
                text += f" Elsewhere: {', '.join(self.elsewhere)}."
        return wrap(
            text, f"  --{self.field.name.rstrip('_')}={format_value(default(self.field))}  ", INDENT
        )

    def names(self) -> str:
        return normalize(self.field.name, *self.elsewhere)

    def matches(self, terms: Sequence[str]) -> bool:
        text = self.names() + normalize(self.meaning)
        return all(term in text for term in terms)


@dataclass
class Page:
    """The help page of a command."""

    opening: str  # describes the command and its usage, in lines shorter than 80 columns
    # {name: a dataclass of options}; the name is "" if there is only one section
    sections: dict[str, type]
    usual: Collection[str] = ()  # the options that --help shows, in brief; empty: all of them
    # A function that returns {a setting of another program: its Entry}.
    load_entries: Callable[[], Mapping[str, Any]] = dict

    def text(self, asked: str) -> str:
        """Formats the page.

        asked: the result of `help_query`. Raises UserError if `asked` is a search that finds nothing."""
        if asked not in ("", "all") and self.sections:
            return "\n".join(self.search(asked))
        is_brief = bool(self.usual) and not asked
        lines = [self.opening.strip()]
        for section, kind in self.sections.items():
            here = self.options(kind, {} if is_brief else self.load_entries())
            if is_brief:
                here = [option for option in here if option.field.name in self.usual]
            if here:
                title = f"{section}: {first_sentence(str(kind.__doc__))}"
                lines += ["", *wrap(section and title)]
            for option in here:
                lines += option.lines(is_brief)
        if is_brief:
            lines += [
                "",
                *wrap("--help=all shows all options, --help=WORD those about a topic."),
            ]
        return "\n".join(lines)

    def search(self, asked: str) -> list[str]:
        """Returns the lines about all options that match every search term in `asked`. The options with the most
        matches in their names come first. If no option matches, searches the settings of other programs. Raises
        UserError if nothing is found."""
        terms = [f" {word.removesuffix('s')}" for word in normalize(asked).split()]
        entries = self.load_entries()
        entry = entries.get("_".join(asked.split()))
        if entry and not entry.setting:
            return wrap(f"{asked} is not a setting here: {entry.why}")
        options = [
            option for kind in self.sections.values() for option in self.options(kind, entries)
        ]
        matching = [option for option in options if terms and option.matches(terms)]
        if not matching:
            return self._search_elsewhere(asked, terms, options, entries)
        matching.sort(key=lambda option: -sum(term in option.names() for term in terms))
        return [line for option in matching for line in option.lines(is_brief=False)]

    def _search_elsewhere(
        self,
        asked: str,
        terms: Sequence[str],
        options: Sequence[Option],
        entries: Mapping[str, Any],
    ) -> list[str]:
        """Searches the settings of other programs for terms that match no option.

        Returns the lines found. Raises UserError, with a suggestion, if there are none."""
        lines = []
        for name, entry in entries.items():
            if terms and entry.why and all(term in normalize(name) for term in terms):
                lines += wrap(f"{name} is not a setting here: {entry.why}")
        if lines:
            return lines
        names = [name for option in options for name in (option.field.name, *option.elsewhere)]
        names += [part for name in names for part in name.split("_")]
        hint = suggest_name(asked, names, "--help=all lists all", "--help=")
        raise UserError(f"--help={asked}: no option matches; {hint}")

    def options(self, kind: type, entries: Mapping[str, Any]) -> list[Option]:
        """Returns the options of the dataclass `kind`.

        entries: {a setting of another program: its Entry}; they give the options' names elsewhere."""
        options = []
        for field in dataclasses.fields(kind):
            elsewhere = field.metadata["elsewhere"].split()
            for word, entry in entries.items():
                if entry.setting == field.name != word and "." not in word:
                    elsewhere.append(word)
            options.append(Option(field, field_docs(kind)[field.name], elsewhere))
        return options


def first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".")


def wrap(text: str, first: str = "", indent: int = 0) -> list[str]:
    """Wraps a paragraph to the width of the terminal.

    first: written at the beginning of the first line. indent: the number of spaces before the other lines."""
    width = min(max(shutil.get_terminal_size().columns - 1, MIN_COLUMNS), MAX_COLUMNS)
    return textwrap.wrap(
        " ".join(text.split()),
        width,
        initial_indent=first.ljust(indent),
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )


def normalize(*texts: str) -> str:
    """Returns the words of the texts in lower case, each with a leading space, so that searching " word" in it finds the
    beginning of a word."""
    return "".join(f" {word}" for text in texts for word in re.findall("[a-z0-9]+", text.lower()))


@lru_cache(maxsize=None)
def field_docs(section: type) -> dict[str, str]:
    """Returns {field name: the string below it} for the fields of the dataclass `section` and its base classes."""
    meanings: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, section.__bases__):
        meanings |= field_docs(base)
    (described,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(described, ast.ClassDef)
    for above, below in zip(described.body, described.body[1:]):
        match above, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                meanings[name] = " ".join(text.split())
    return meanings
