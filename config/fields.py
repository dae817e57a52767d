"""How a setting states its bounds: `name: int = setting(8, at_least=1)` with its meaning as the string below it."""

import dataclasses


def setting(default, *, above=None, at_least=None, at_most=None, choices=None, aliases=()):
    """A dataclass field with the bounds that resolving checks, and the other names by which users may know it.

    A list as default is copied for each instance. `choices` is a tuple of allowed values.
    """
    metadata = {"above": above, "at_least": at_least, "at_most": at_most, "choices": choices, "aliases": aliases}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
