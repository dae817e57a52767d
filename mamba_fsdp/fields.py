"""Defines how options are declared and parsed.

An option is a field of a dataclass, such as `name: int = setting(8, at_least=1)`. The string below the field is its
documentation. The settings of training and the options of get_dataset.py and of all verbs are declared this way.
mamba_fsdp/settings/help.py prints their documentation."""

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
from functools import lru_cache, partial
from typing import Any, NamedTuple

from mamba_fsdp.errors import UserError

BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
UNITS = {"": 0, "k": 3, "m": 6, "b": 9, "g": 9, "t": 12}  # {suffix of a number: power of ten}
NUMBER = r"[+-]?[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:e\+?[0-9]{1,3})?"
# The default upper limit for each type, and for each unit of a Duration. Sizes and times that are calculated from
# larger values would overflow.
MAX_VALUES: dict[object, float] = {
    int: 2**24,
    float: sys.float_info.max,
    "steps": 10**10,
    "tok": 10**14,
}
COMPARISONS = {
    "above": operator.gt,
    "at_least": operator.ge,
    "at_most": operator.le,
    "below": operator.lt,
}


# ---------------------------------------------------------------- declaring options


class Condition(NamedTuple):
    """The condition under which an option has an effect. It is an error to give an option that has no effect, except
    for options of the model: for these, a line is printed."""

    description: str  # completes the sentence "has no effect without ...", as in "a mamba2 layer"
    is_met: Callable[[Any], bool]  # takes a TrainConfig, a ModelConfig or the options of a verb


def condition(description: str) -> Callable[[Callable[[Any], bool]], Condition]:
    """Returns a decorator that converts a predicate of the options to a Condition with this description."""
    return partial(Condition, description)


class Bounds(NamedTuple):
    """The values that an option accepts."""

    limits: dict[str, float]  # {key of COMPARISONS: limit}
    choices: tuple[str, ...]  # the only accepted values; () if the option is not limited to a list
    rejects_empty: bool  # whether an empty text is rejected

    def check(self, value: Any) -> None:
        """Raises ValueError for a value that the option does not accept. The message contains the violated bound."""
        if self.rejects_empty and value == "":
            raise ValueError("the value must not be empty")
        chosen = value if isinstance(value, list) else [value]
        if self.choices and not set(chosen) <= set(self.choices):
            raise ValueError(f"must be one of {', '.join(self.choices)}; --help explains them")
        number = value
        kind: object = type(value)
        if isinstance(value, Duration):
            number = value.count
            kind = value.unit
        limits = self.limits
        if kind in MAX_VALUES:
            limits = {"at_most": MAX_VALUES[kind], **limits}
        for name, limit in limits.items():
            if not COMPARISONS[name](number, limit):
                raise ValueError(f"must be {name.replace('_', ' ')} {limit}")


def setting(
    default: Any,
    *,
    needs: Condition | None = None,
    instead_of: str = "",
    elsewhere: str = "",
    is_path: bool = False,
    choices: tuple[str, ...] = (),
    **limits: float,
) -> Any:
    """Returns a dataclass field that describes a setting.

    default: the default value; a list is copied for each instance. If the default is a non-empty text, the empty text is
    rejected. needs: the condition under which the setting has an effect. instead_of: the setting that this one
    replaces. elsewhere: names of the same setting in other programs, separated by spaces. is_path: whether the value is
    the path of a file or folder. choices: the only accepted values; () if the setting is not limited to a list. limits:
    limits of a number, with the keys of COMPARISONS as names.
    """
    rejects_empty = isinstance(default, str) and default != ""
    metadata = {
        "bounds": Bounds(limits, choices, rejects_empty),
        "needs": needs,
        "instead_of": instead_of,
        "elsewhere": elsewhere,
        "is_path": is_path,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def has_effect(field: dataclasses.Field, options: Any) -> bool:
    """Returns whether the option has an effect together with the values in `options`."""
    needs = field.metadata["needs"]
    return needs is None or needs.is_met(options)


def ineffective_message(field: dataclasses.Field, value: Any) -> str:
    """Returns the message that an option has no effect, and why."""
    return f"{field.name}={format_value(value)} has no effect without {field.metadata['needs'].description}"


def default(field: dataclasses.Field) -> Any:
    """Returns the default of a dataclass field. Calls default_factory if the field has one."""
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


# ---------------------------------------------------------------- parsing values


@dataclass(frozen=True)
class Duration:
    """A length of training: a number of optimizer steps, or a number of tokens if it is written with `tok`, as in
    2Btok."""

    count: int
    unit: str  # "steps" or "tok"

    @classmethod
    def parse(cls, text: str) -> "Duration":
        """Parses a text such as 2000, 2k, 1006878720tok, 1.5Btok or -1 (automatic). Raises ValueError for other
        texts."""
        unit = "tok" if text.endswith("tok") else "steps"
        try:
            count = parse_integer(text.removesuffix("tok"))
        except ValueError as error:
            raise ValueError(
                f"{error} of steps, as in 2000 or 10k, or of tokens, as in 1000tok or 2Btok"
            ) from None
        if count < 0 and unit == "tok":
            raise ValueError("expected a number of tokens that is not negative")
        return cls(count, unit)

    def steps(self, tokens_per_step: int) -> int:
        """Returns the duration in steps, rounded up to a whole number."""
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


def parse_boolean(text: str) -> bool:
    """Parses true, yes, on, 1, false, no, off or 0, in upper or lower case. Raises ValueError for other texts."""
    if text.lower() not in BOOLEANS:
        raise ValueError("expected true or false")
    return BOOLEANS[text.lower()]


def parse_integer(text: str) -> int:
    """Parses a text such as 2000, 2_000, 2e3, 10k, 1.5M or 2B exactly. Raises ValueError for other texts, for
    numbers that are not whole, and for numbers that do not fit into 64 bits."""
    match = re.fullmatch(f"({NUMBER})([kmbgt]?)", text.lower())
    if not match:
        raise ValueError("expected a whole number")
    number = Decimal(match[1]).scaleb(UNITS[match[2]])
    if number != number.to_integral_value():
        raise ValueError("expected a whole number")
    if abs(number) >= 2**63:
        raise ValueError("expected a number between -2 ** 63 and 2 ** 63")
    return int(number)


def parse_float(text: str) -> float:
    """Parses a float. Raises ValueError for other texts, and for nan and inf."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("expected a number") from None
    if not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value


# {type of an option: (parser, name of the type on help pages)}
PARSERS: dict[Any, tuple[Any, str]] = {
    bool: (parse_boolean, "true|false"),
    int: (parse_integer, "whole number"),
    float: (parse_float, "number"),
    Duration: (Duration.parse, "steps or tokens"),
    str: (str, "text"),
    list[str]: (list, "names"),
    list[int]: (list, "whole numbers"),
    list[float]: (list, "numbers"),
}


def parse(kind: Any, text: Any) -> Any:
    """Parses the text of an option.

    kind: the type of the option, a key of PARSERS. text: a string. For an option that is a list, it can also be a list
    that has been read from YAML.

    Raises ValueError if the text does not have this type.
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
        parser, _ = PARSERS[kind]
        return parser(written.strip())
    if "\0" in written:
        raise ValueError("contains a NUL character")
    return written


def read_field(name: str, field: dataclasses.Field, text: Any, where: str = "") -> Any:
    """Parses the text of the option `name`, and checks the value.

    field: the dataclass field of the option. where: the end of the error message, as in " (in my.yaml)". Choices can be
    written in upper or lower case. Raises UserError if the text does not have the option's type, or if the option does
    not accept the value."""
    bounds = field.metadata["bounds"]
    lowered = str(text).lower()
    if lowered in bounds.choices:
        text = lowered
    try:
        value = parse(field.type, text)
        if field.metadata["is_path"]:  # a shell expands ~ in an argument, but not after --name=
            value = os.path.expanduser(value)
            if re.search(r"\$(\w|\{\w)", value):
                expanded = os.path.expandvars(value)
                raise ValueError(f"environment variables are not expanded here; write {expanded}")
        bounds.check(value)
    except ValueError as error:
        raise UserError(f"{name}={text}: {error}{where}") from None
    return value


@lru_cache(maxsize=None)
def parse_pairs(name: str, text: str) -> dict[str, float]:
    """Parses the text of the setting `name`, a list such as embedding=12,logits=0.125, and returns {key: number}.
    Raises UserError for other texts."""
    numbers = {}
    for item in filter(None, text.replace(" ", "").split(",")):
        key, _, value = item.partition("=")
        try:
            numbers[key] = parse_float(value)
        except ValueError as error:
            raise UserError(f"{name}: {item}: {error}; write NAME=NUMBER") from None
    return numbers


def format_value(value: Any) -> str:
    """Formats a value in the notation of the command line."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def describe_type(field: dataclasses.Field) -> str:
    """Describes the values that an option accepts: its choices, or its type and limits."""
    bounds = field.metadata["bounds"]
    if bounds.choices:
        separator = "," if isinstance(default(field), list) else " | "
        return separator.join(bounds.choices)
    _, kind = PARSERS[field.type]
    limits = [f"{name.replace('_', ' ')} {limit}" for name, limit in bounds.limits.items()]
    return ", ".join([kind, *limits])
