"""Files that anyone may have written: whatever is wrong with them is a ValueError, no other exception."""

import json
from typing import Any


def parse_json(text: str | bytes | bytearray) -> Any:
    """What `text` says."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_object(text: str | bytes | bytearray) -> dict[str, Any]:
    """What `text` says, which has to be an object."""
    if not isinstance(content := parse_json(text), dict):
        raise ValueError("no JSON object")
    return content


def file_name(name: Any) -> str:
    """`name`, which has to be that of a file in the folder of who names it: no path leads elsewhere."""
    if isinstance(name, str) and 0 < len(name) < 256 and not {"/", "\0"} & {*name} and name not in (".", ".."):
        return name
    raise ValueError(f"{str(name)[:60]!r} is not the name of a file in this folder")
