"""Defines how an option is described (`name: int = setting(8, at_least=1)`, with its meaning in the
string below), and how its text becomes a value. The settings of training and the options of
get_dataset.py and of the verbs are described this way; mamba_fsdp/settings/help.py shows them."""

import dataclasses
import math
import operator
import os
import re
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

from mamba_fsdp.errors import UserError

TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")
BOOLEANS = dict.fromkeys(TRUE, True) | dict.fromkeys(FALSE, False)
UNITS = {"": 0, "k": 3, "m": 6, "b": 9, "g": 9, "t": 12}  # powers of ten, in either case
NUMBER = r"[+-]?[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:e\+?[0-9]{1,3})?"
# The largest number of each type, and of each unit of a Duration, unless a setting names another: beyond it, sizes and
# times overflow.
MOST: dict[object, float] = {
    int: 2**24,
    float: sys.float_info.max,
    "steps": 10**10,
    "tok": 10**14,
}
LIMITS = {
    "above": operator.gt,
    "at_least": operator.ge,
    "at_most": operator.le,
    "below": operator.lt,
}


# ---------------------------------------------------------------- describing


class Needs(NamedTuple):
    """The condition under which an option has an effect. An option that is given but has no effect is refused; if it
    belongs to the model, a line only says so."""

    words: str  # as in "has no effect without a mamba2 layer"
    met: Callable[[Any], bool]  # takes the TrainConfig, the ModelConfig or a verb's options


def condition(words: str) -> Callable[[Callable[[Any], bool]], Needs]:
    """Returns a decorator that makes Needs, described by `words`, from the function that tests them."""

    def needs(met: Callable[[Any], bool]) -> Needs:
        return Needs(words, met)

    return needs


class Bounds(NamedTuple):
    """The bounds of an option's values."""

    limits: dict[str, float]  # by their names in LIMITS
    choices: tuple[str, ...]
    some_text: bool

    def check(self, value: Any) -> None:
        """Raises ValueError, which names the bound, for a value out of bounds."""
        if self.some_text and value == "":
            raise ValueError("expected some text")
        chosen = value if isinstance(value, list) else [value]
        if self.choices and not set(chosen) <= set(self.choices):
            raise ValueError(f"must be one of {', '.join(self.choices)}")
        number = value
        kind: object = type(value)
        if isinstance(value, Duration):
            number = value.count
            kind = value.unit
        limits = self.limits
        if kind in MOST:
            limits = {"at_most": MOST[kind], **limits}
        for name, limit in limits.items():
            if not LIMITS[name](number, limit):
                raise ValueError(f"must be {name.replace('_', ' ')} {limit}")


def setting(
    default: Any,
    *,
    needs: Needs | None = None,
    instead_of: str = "",
    elsewhere: str = "",
    is_path: bool = False,
    choices: tuple[str, ...] = (),
    **limits: float,
) -> Any:
    """Returns a dataclass field that describes a setting.

    needs: the condition under which it has an effect. instead_of: the setting that it replaces. elsewhere: its names in
    other programs. is_path: whether it names a file or folder. limits: values for the keys of LIMITS. A list as default
    is copied for each instance. If the default is a non-empty text, no value may be empty.
    """
    some_text = isinstance(default, str) and default != ""
    metadata = {
        "bounds": Bounds(limits, choices, some_text),
        "needs": needs,
        "instead_of": instead_of,
        "elsewhere": elsewhere,
        "is_path": is_path,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def has_effect(leaf: dataclasses.Field, options: Any) -> bool:
    """Returns whether an option has an effect among these options."""
    needs = leaf.metadata["needs"]
    return needs is None or needs.met(options)


def does_nothing(leaf: dataclasses.Field, value: Any) -> str:
    """Returns the sentence about an option without effect."""
    return f"{leaf.name}={shown(value)} has no effect without {leaf.metadata['needs'].words}"


def default(leaf: dataclasses.Field) -> Any:
    """Returns the default of a dataclass field, which a factory may make."""
    if leaf.default_factory is dataclasses.MISSING:
        return leaf.default
    return leaf.default_factory()


# ---------------------------------------------------------------- from text to a value


@dataclass(frozen=True)
class Duration:
    """A length of training: a count of optimiser steps, or of tokens when written with `tok`, as in
    2Btok."""

    count: int
    unit: str  # "steps" or "tok"

    @classmethod
    def parse(cls, text: str) -> "Duration":
        """Returns the Duration of a text such as 2000, 2k, 1006878720tok, 1.5Btok or -1 (automatic).
        Raises ValueError for any other text."""
        unit = "tok" if text.endswith("tok") else "steps"
        try:
            count = whole_number(text.removesuffix("tok"))
        except ValueError as error:
            raise ValueError(
                f"{error} of steps, as in 2000 or 10k, or of tokens, as in 1000tok or 2Btok"
            ) from None
        if count < 0 and unit == "tok":
            raise ValueError("expected tokens from 0 up")
        return cls(count, unit)

    def steps(self, tokens_per_step: int) -> int:
        """Returns the duration in whole steps, rounded up."""
        if self.unit == "steps":
            return self.count
        return -(-self.count // tokens_per_step)

    def tokens(self, tokens_per_step: int) -> int:
        """Returns the duration in tokens."""
        if self.unit == "tok":
            return self.count
        return self.count * tokens_per_step

    def __str__(self) -> str:
        return str(self.count) if self.unit == "steps" else f"{self.count}tok"


def boolean(text: str) -> bool:
    """Returns the value of true, yes, on, 1 and their opposites. Raises ValueError for other text."""
    if text.lower() not in BOOLEANS:
        raise ValueError("expected true or false")
    return BOOLEANS[text.lower()]


def whole_number(text: str) -> int:
    """Returns the exact value of a text such as 2000, 2_000, 2e3, 10k, 1.5M or 2B. Raises ValueError
    for text that is not a whole number."""
    match = re.fullmatch(f"({NUMBER})([kmbgt]?)", text.lower())
    if not match:
        raise ValueError("expected a whole number")
    number = Decimal(match[1]).scaleb(UNITS[match[2]])
    if number != number.to_integral_value():
        raise ValueError("expected a whole number")
    if abs(number) >= 2**63:
        raise ValueError("expected a number below 2 ** 63")
    return int(number)


def finite_number(text: str) -> float:
    """Returns the float that `text` gives. Raises ValueError for other text, and for nan and inf."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("expected a number") from None
    if not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value


KINDS: dict[Any, tuple[Any, str]] = {  # a type's parser, and its name on a help page
    bool: (boolean, "true|false"),
    int: (whole_number, "whole number"),
    float: (finite_number, "number"),
    Duration: (Duration.parse, "steps or tokens"),
    str: (str, "text"),
    list[str]: (list, "names"),
    list[int]: (list, "whole numbers"),
    list[float]: (list, "numbers"),
}


def parse(kind: Any, text: Any) -> Any:
    """Returns the value of `text`, which in YAML may be a list of texts, as the type `kind` of KINDS.

    Raises ValueError, which says what was expected.
    """
    if typing.get_origin(kind) is list:
        (element,) = typing.get_args(kind)
        parts = text
        if not isinstance(text, list):
            parts = [part.strip() for part in str(text).strip("[]() ").split(",")]
        return [
            parse(element, part) for part in parts if str(part or "").lower() not in ("", "none")
        ]
    if isinstance(text, (list, dict)):
        raise ValueError("expected one value")
    written = "" if text is None else str(text)
    if kind is not str:
        parser, _ = KINDS[kind]
        return parser(written.strip())
    if "\0" in written:
        raise ValueError("holds a NUL character")
    return written


def read_field(name: str, leaf: dataclasses.Field, text: Any, where: str = "") -> Any:
    """Returns the value that `text` gives to the option `name`, described by the dataclass field
    `leaf`. The case of a choice does not matter. Raises UserError for text of another type or a
    value out of bounds; its message ends in `where`."""
    bounds = leaf.metadata["bounds"]
    small = str(text).lower()
    if small in bounds.choices:
        text = small
    try:
        value = parse(leaf.type, text)
        if leaf.metadata["is_path"]:  # a shell does so, but not after --name=
            value = os.path.expanduser(value)
            if re.search(r"\$(\w|\{\w)", value):
                expanded = os.path.expandvars(value)
                raise ValueError(f"variables are not expanded here; write {expanded}")
        bounds.check(value)
    except ValueError as error:
        raise UserError(f"{name}={text}: {error}{where}") from None
    return value


@lru_cache(maxsize=None)
def named_numbers(name: str, text: str) -> dict[str, float]:
    """Returns the numbers in the `text` of the setting `name`, as in embedding=12,logits=0.125.
    Raises UserError for any other text."""
    numbers = {}
    for item in filter(None, text.replace(" ", "").split(",")):
        key, _, value = item.partition("=")
        try:
            numbers[key] = finite_number(value)
        except ValueError as error:
            raise UserError(f"{name}: {item}: {error}") from None
    return numbers


def shown(value: Any) -> str:
    """Returns a value as it is written on the command line."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def takes(leaf: dataclasses.Field) -> str:
    """Returns, in words, the values that the field `leaf` takes: its choices, or its type and limits."""
    bounds = leaf.metadata["bounds"]
    if bounds.choices:
        separator = "," if isinstance(default(leaf), list) else " | "
        return separator.join(bounds.choices)
    _, kind = KINDS[leaf.type]
    limits = [f"{name.replace('_', ' ')} {limit}" for name, limit in bounds.limits.items()]
    return ", ".join([kind, *limits])
