"""Parses untrusted JSON and checks that it has the expected types. For any error in the content, parse_object and from_json
raise ValueError, never another exception."""

import json
import reprlib
from collections.abc import Callable
from dataclasses import MISSING, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, NewType, TypeVar, get_args, get_origin

from mamba_fsdp.errors import UserError
from mamba_fsdp.storage.formats import Format
from mamba_fsdp.storage.retry import read_bytes, write_atomically

T = TypeVar("T")
FileName = NewType("FileName", str)  # the name of a file in the same folder
KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    FileName: "the name of a file in this folder",
    list: "a list",
    dict: "an object",
}


def at_least(least: int) -> Any:
    """Returns a dataclass field for whole numbers of at least `least`. Whole numbers in other fields must be at least 0."""
    return field(metadata={"least": least})


def from_json(kind: Callable[..., T], value: Any, name: str = "the content", least: int = 0) -> T:
    """Checks that a parsed JSON value has the type `kind`, and returns it. JSON objects are converted to dataclasses.

    kind: int, float, str, bool, FileName or Any; `X | None`, list[X] or dict[str, X] with another kind X; or a dataclass with
    fields of these kinds. For a dataclass, the JSON object must have every field without a default, and must not have unknown
    fields, unless the class has the attribute HAS_OTHER_FIELDS. name: describes the value in messages. least: the minimum of
    a whole number. Raises ValueError if the value has another type, or is a whole number below `least`.
    """
    if kind is Any:
        return value
    basis = get_origin(kind) or kind
    arguments = get_args(kind)
    if basis is UnionType:
        if value is not None:
            value = from_json(arguments[0], value, name)
    elif is_dataclass(kind):
        value = kind(**_values_of_fields(kind, value, name))
    elif not _is_of_kind(value, basis, least):
        bound = f" of at least {least}" if basis is int else ""
        raise ValueError(f"{name} is {reprlib.repr(value)}, not {KINDS[basis]}{bound}")
    elif basis is list:
        value = [from_json(arguments[0], item, f"an item of {name}") for item in value]
    elif basis is dict:
        value = {
            from_json(arguments[0], key, f"a name in {name}"): from_json(
                arguments[1], item, repr(key[:60])
            )
            for key, item in value.items()
        }
    return value


def _is_of_kind(value: Any, basis: Any, least: int) -> bool:
    if basis is FileName:
        is_short = type(value) is str and 0 < len(value) < 256
        return is_short and "/" not in value and "\0" not in value and value not in (".", "..")
    if type(value) is int:
        return basis in (int, float) and least <= value < 1 << 63
    return type(value) is basis


def _values_of_fields(kind: Any, value: Any, name: str) -> dict[str, Any]:
    """Returns {field name: checked value} for the fields of the dataclass `kind`, from the JSON object `value`."""
    content = from_json(dict[str, Any], value, name)
    values = {}
    for described in fields(kind):
        if described.name in content:
            least = described.metadata.get("least", 0)
            item = content.pop(described.name)
            field_kind: Any = described.type
            values[described.name] = from_json(field_kind, item, described.name, least)
        elif described.default is MISSING and described.default_factory is MISSING:
            raise ValueError(f"{name} lacks {described.name}")
    if content and not hasattr(kind, "HAS_OTHER_FIELDS"):
        raise ValueError(f"{name} has an unknown field {min(content)[:60]!r}")
    return values


def parse_object(text: str | bytes | bytearray) -> dict[str, Any]:
    """Parses a JSON object. Raises ValueError if `text` is not valid JSON or not an object."""
    try:
        return from_json(dict[str, Any], json.loads(text))
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def read_object(path: Path, kind: Any, remedy: str, file_format: Format | None = None) -> Any:
    """Reads a JSON object from a file and checks its type.

    kind: the expected type, see from_json. remedy: the end of error messages. file_format: the format in the file's header.
    Raises FileNotFoundError if the file does not exist, StorageError after a minute of retries, and UserError if the file
    can't be read or has another type or format."""
    try:
        content = parse_object(read_bytes(path))
        if file_format:
            content = file_format.body(path, content)
        return from_json(kind, content)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: can't be read ({reason}); {remedy}") from None


def write_object(path: Path, content: dict) -> None:
    """Replaces a file atomically by a JSON object that read_object can read. Raises StorageError after a minute of retries,
    and other OSErrors immediately."""
    write_atomically(path, json.dumps(content, indent=1) + "\n")
