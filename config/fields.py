"""How a setting states its bounds and what it needs: `name: int = setting(8, at_least=1)`, its meaning as the string
below it."""

import dataclasses
import re
from decimal import Decimal
from typing import Callable, NamedTuple


class Needs(NamedTuple):
    """What must hold for a setting to have an effect; given where it has none, it is refused."""

    words: str  # as in "does nothing without a mamba2 layer"
    met: Callable  # of the TrainConfig


def setting(default, *, above=None, at_least=None, at_most=None, choices=None, aliases=(), needs=None):
    """A dataclass field with the bounds that resolving checks, and the other names by which users may know it.

    A list as default is copied for each instance. `choices` is a tuple of allowed values; `needs` a Needs.
    """
    metadata = {"above": above, "at_least": at_least, "at_most": at_most, "choices": choices, "aliases": aliases,
                "needs": needs}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def whole_number(text):
    """The int that 2000, 2_000, 2e3 or 1.5e9 says, exactly. Raises ValueError."""
    if not re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*(\.[0-9]+)?(e\+?[0-9]{1,3})?", text.lower()):
        raise ValueError("expected a whole number")
    number = Decimal(text)
    if number != number.to_integral_value():
        raise ValueError("expected a whole number")
    if abs(number) >= 2 ** 63:
        raise ValueError("expected a number below 2 ** 63")
    return int(number)
