"""Prints help pages: --help shows the usual options, --help=all every option, --help=WORD the options about
a word. The text on an option comes from the dataclass that describes it."""

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

from mamba_fsdp.errors import PROJECT, UserError
from mamba_fsdp.fields import default, shown, takes
from mamba_fsdp.storage.patience import is_file, read_text
from mamba_fsdp.text import suggest_name

NARROWEST = 60
WIDEST = 100  # columns: longer lines are hard to read
MOST_LINES = 12  # of docs, in one answer
MEANING_AT = 28  # the column where meanings begin


def asked_for(arguments: Sequence[str]) -> str | None:
    """Returns what a command line asks of the help page: "" for the usual options, `all`, or words to search for; None
    if it does not ask for help."""
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
    """An option as a help page shows it."""

    leaf: dataclasses.Field
    meaning: str
    elsewhere: list[str]  # its names in other programs

    def lines(self, is_brief: bool) -> list[str]:
        """Returns the lines with its name, default and meaning; is_brief: only the meaning's first
        sentence."""
        text = self.meaning
        if is_brief:
            text = first_sentence(text)
        else:
            text += f" ({takes(self.leaf)})"
            if self.elsewhere:
                text += f" Elsewhere: {', '.join(self.elsewhere)}."
        return wrapped(
            text, f"  --{self.leaf.name.rstrip('_')}={shown(default(self.leaf))}  ", MEANING_AT
        )

    def names(self) -> str:
        return words_of(self.leaf.name, *self.elsewhere)

    def is_about(self, words: Sequence[str]) -> bool:
        text = self.names() + words_of(self.meaning)
        return all(word in text for word in words)


@dataclass
class Page:
    """The help page of a command."""

    opening: str  # what the command does and how it is called, in lines of less than 80 columns
    sections: dict[str, type]  # {name: a dataclass of options}; the name of a single one is ""
    usual: Collection[str] = ()  # the options that --help shows, in brief; empty: all of them
    words: Callable[[], Mapping[str, Any]] = dict  # returns {a word of other programs: its Entry}

    def text(self, asked: str) -> str:
        """Returns the page for the answer of `asked_for`. Raises UserError if no option is about the
        words."""
        if asked not in ("", "all") and self.sections:
            return "\n".join(self.matching(asked))
        is_brief = bool(self.usual) and not asked
        lines = [self.opening.strip()]
        for section, kind in self.sections.items():
            here = self.options(kind, {} if is_brief else self.words())
            if is_brief:
                here = [option for option in here if option.leaf.name in self.usual]
            if here:
                title = f"{section}: {first_sentence(str(kind.__doc__))}"
                lines += ["", *wrapped(section and title)]
            for option in here:
                lines += option.lines(is_brief)
        if is_brief:
            lines += [
                "",
                *wrapped("--help=all shows all options, --help=WORD the options about a word."),
            ]
        return "\n".join(lines)

    def matching(self, asked: str) -> list[str]:
        """Returns the lines on the options about the words `asked`; options with most of the words in their names come
        first."""
        words = [f" {word.removesuffix('s')}" for word in words_of(asked).split()]
        entries = self.words()
        entry = entries.get("_".join(asked.split()))
        if entry and not entry.setting:
            return wrapped(f"{asked} is not a setting here: {entry.why}")
        options = [
            option for kind in self.sections.values() for option in self.options(kind, entries)
        ]
        matching = [option for option in options if words and option.is_about(words)]
        if not matching:
            return self._answers_besides(asked, words, options, entries)
        matching.sort(key=lambda option: -sum(word in option.names() for word in words))
        return [line for option in matching for line in option.lines(is_brief=False)]

    def _answers_besides(
        self,
        asked: str,
        words: Sequence[str],
        options: Sequence[Option],
        entries: Mapping[str, Any],
    ) -> list[str]:
        """Returns what other programs' words and docs/ say about words that no option is about. Raises UserError if that
        is nothing."""
        lines = []
        for name, entry in entries.items():
            if words and entry.why and all(word in words_of(name) for word in words):
                lines += wrapped(f"{name} is not a setting here: {entry.why}")
        lines = lines or in_docs(asked)
        if lines:
            return lines
        names = [name for option in options for name in (option.leaf.name, *option.elsewhere)]
        names += [part for name in names for part in name.split("_")]
        hint = suggest_name(asked, names, "--help=all lists all", "--help=")
        raise UserError(f"--help={asked}: no option is about that; {hint}")

    def options(self, kind: type, entries: Mapping[str, Any]) -> list[Option]:
        """Returns the options of the dataclass `kind`. entries: words of other programs."""
        options = []
        for leaf in dataclasses.fields(kind):
            elsewhere = leaf.metadata["elsewhere"].split()
            for word, entry in entries.items():
                if entry.setting == leaf.name != word and "." not in word:
                    elsewhere.append(word)
            options.append(Option(leaf, meanings_in(kind)[leaf.name], elsewhere))
        return options


def in_docs(asked: str) -> list[str]:
    """Returns the first lines of README.md and docs/ with the words `asked`; none in an installed package."""
    words = words_of(asked).split()
    lines = []
    for file in [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]:
        content = read_text(file).splitlines() if is_file(file) else []
        for number, line in enumerate(content, 1):
            if words and all(f" {word}" in words_of(line) for word in words):
                lines += wrapped(line.strip(), f"{file.relative_to(PROJECT)}:{number}  ", 4)
                break
    return lines[:MOST_LINES]


def first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".")


def wrapped(text: str, first: str = "", indent: int = 0) -> list[str]:
    """Returns the lines of a paragraph in the terminal's width; the first line begins with `first`."""
    width = min(max(shutil.get_terminal_size().columns - 1, NARROWEST), WIDEST)
    return textwrap.wrap(
        " ".join(text.split()),
        width,
        initial_indent=first.ljust(indent),
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )


def words_of(*texts: str) -> str:
    """Returns the words of the texts in lower case, each with a space before it."""
    return "".join(f" {word}" for text in texts for word in re.findall("[a-z0-9]+", text.lower()))


@lru_cache(maxsize=None)
def meanings_in(section: type) -> dict[str, str]:
    """Returns {field name: the string below it} of the dataclass `section` and its base classes."""
    meanings: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, section.__bases__):
        meanings |= meanings_in(base)
    (described,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(described, ast.ClassDef)
    for above, below in zip(described.body, described.body[1:]):
        match above, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                meanings[name] = " ".join(text.split())
    return meanings
