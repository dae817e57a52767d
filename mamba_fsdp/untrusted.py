"""Files that anyone may have written: whatever is wrong with them is a ValueError, no other exception."""

import json
from typing import Any


def parse_object(text: str | bytes | bytearray) -> dict[str, Any]:
    """What `text` says, which has to be an object."""
    try:
        return like(json.loads(text), {})
    except RecursionError:
        raise ValueError("nested too deeply") from None


def like(value: Any, example: Any) -> Any:
    """`value`, where it is such a thing as `example`: a number from that on, a list of such items, an object with such
    fields, that of "" standing for all; `...`: the name of a file in this folder."""
    kind: Any = (
        str if example is ... else (int, float) if isinstance(example, float) else type(example)
    )
    if not isinstance(value, kind) or not (
        0 < len(value) < 256 and not {"/", "\0"} & {*value} and value not in (".", "..")
        if example is ...
        else not isinstance(example, int) or example <= value < 1 << 63
    ):
        wanted = (
            "the name of a file in this folder" if example is ... else f"a {type(example).__name__}"
        )
        raise ValueError(f"{str(value)[:60]!r} is not {wanted}")
    for name in example if isinstance(example, dict) else ():
        for field in [value.get(name)] if name else value.values():
            like(field, example[name])
    for item in value if isinstance(example, list) else ():
        like(item, *example)
    return value
