"""Formats numbers, names, times and untrusted text for messages and records."""

import datetime
import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def format_count(number: int, noun: str) -> str:
    """Formats a count with its noun, for example "1 step", "1,000 steps" or "2 losses"."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def format_quantity(number: float, unit: str) -> str:
    """Formats a number with a metric prefix and a unit, for example 12345678 and "B" as "12.3 MB"."""
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.1f} {prefix}{unit}"
    return f"{number:.0f} {unit}"


def escape_unprintable(text: str) -> str:
    """Escapes characters that can't be printed, for example a line break as \\n.

    Text from a file can then neither start a new line nor send control sequences to the terminal.
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def suggest_name(
    name: str,
    candidates: Iterable[str],
    otherwise: str,
    dashes: str = "",
    elsewhere: Mapping[str, str] = {},
) -> str:
    """Returns a hint that suggests the candidate most similar to an unknown `name`; `otherwise` if none is similar.

    dashes: the prefix of the candidate in the hint, "--" for an option. elsewhere: {name in another program: candidate}.
    `name` is compared with these names too.
    """
    near = difflib.get_close_matches(name, [*candidates, *elsewhere], n=1, cutoff=0.75)
    if not near:
        return otherwise
    return f"did you mean {dashes}{elsewhere.get(near[0], near[0])}?"


def suggest_path(path: Path) -> str:
    """Returns a hint for a path that does not exist: the target of a broken link, or a similar name in the same folder;
    "" if there is neither."""
    if path.is_symlink():
        return f"; it is a link to {os.readlink(path)}"
    hint = suggest_name(path.name, [neighbour.name for neighbour in path.parent.glob("*")], "")
    return f"; {hint}" if hint else ""


def utc_timestamp() -> str:
    """Returns the current time in UTC, in ISO 8601 format and to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
