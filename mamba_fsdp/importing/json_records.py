"""Reads the records of JSON files, one a line or not, and finds the text in a record."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mamba_fsdp.errors import first_line
from mamba_fsdp.importing.inputs import Document, Fault, InputFile
from mamba_fsdp.importing.kinds import CLEAN, CONVERT
from mamba_fsdp.importing.text_files import (
    LONGEST_LINE,
    LONGEST_TEXT,
    lines_of,
    opened,
    too_long,
)
from mamba_fsdp.settings.dataset_config import DatasetConfig

MAX_NAMES = 10  # fields in one message
DECODER = json.JSONDecoder()
VALUE = re.compile(r"[^ \t\n\r]")  # its first character


class Record(NamedTuple):
    """A record of a file."""

    place: str  # such as "line 7"
    value: Any


def json_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document | Fault]:
    """Yields the text of each record of a JSON file. Raises ValueError."""
    for record in records_in(file, options):
        if isinstance(record, Fault):
            yield record
        else:
            yield field_of(record.place, record.value, options.text_column)


def records_in(file: InputFile, options: DatasetConfig) -> Iterator[Record | Fault]:
    """Yields the records of a file with one on each line. A file with a single value, such as a list of records, or
    with values over several lines is read whole. Raises ValueError if that is not possible."""
    with opened(file, options.encoding) as stream:
        lines = lines_of(stream)
        beginning = []  # the lines up to the second that is not blank
        filled: list[str] = []
        for line in lines:
            beginning.append(line)
            if not line.isspace():
                filled.append(line.strip())
            if len(filled) == 2:
                break
        if len(filled) == 1 or filled and (filled[0][0] == "[" or filled[0][-1] in "{[,"):
            text = "".join(beginning) + stream.read(LONGEST_LINE)
            yield from _read_whole(file, text, options.text_column)
            return
        for number, line in enumerate(itertools.chain(beginning, lines), 1):
            place = f"line {number:,}"
            try:
                values = _parsed(place, line)
            except ValueError as error:
                yield Fault(str(error))
            else:
                yield from [Record(place, value) for value in values]


def _read_whole(file: InputFile, text: str, column: str) -> Iterator[Record]:
    if len(text) >= LONGEST_LINE:
        raise ValueError(f"one value of {LONGEST_LINE:,} characters or more; {CLEAN}")
    values = _parsed("it", text)
    if len(values) == 1:
        (value,) = values
        if isinstance(value, dict):
            values = _rows_within(value, column)
        elif isinstance(value, list):
            values = value
    for number, value in enumerate(values, 1):
        file.share_read = number / len(values)
        yield Record(f"record {number:,}", value)


def _rows_within(value: dict[str, Any], column: str) -> list[Any]:
    """Returns the rows in a file's only object: the values of its column, which can be numbered; its only list of
    objects; or its values if all are objects. Otherwise the object itself is the row."""
    texts = value.get(column)
    if isinstance(texts, dict) and all(map(str.isdecimal, texts)):
        texts = list(texts.values())
    if isinstance(texts, list) and all(
        text is None or isinstance(text, (str, list)) for text in texts
    ):
        return texts
    tables = [rows for rows in value.values() if _is_table(rows)]
    if column not in value and len(tables) == 1:
        return tables[0]
    rows = list(value.values())
    if column not in value and len(rows) > 1 and _is_table(rows):
        return rows
    return [value]


def _parsed(place: str, text: str) -> list[Any]:
    """Returns the values in a text, usually one. Raises ValueError."""
    values = []
    at = 0
    try:
        while start := VALUE.search(text, at):
            value, at = DECODER.raw_decode(text, start.start())
            values.append(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {first_line(error)}") from None
    return values


def field_of(place: str, record: Any, column: str) -> Document | Fault:
    """Returns the text or the token ids that `column` names in a record; "" for null. document.text is the field text of
    document. A record without fields is its own text."""
    value = record
    fields = record if isinstance(record, dict) else {}
    names = [column] if column in fields else column.split(".")
    if isinstance(record, (str, list)):
        names = []
    for name in names:
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif value is not None:
            return without_text(place, record, column)
    if isinstance(value, dict):
        return without_text(place, record, column)
    if value is None:
        return Document("")
    if value == [] or are_token_ids(value):
        return Document(np.array(value, dtype=np.int64))
    if not isinstance(value, str):
        reason = f"{place}: {column!r} is {type(value).__name__}, not text or token ids"
        return Fault(reason, CONVERT if isinstance(value, list) else "")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])
        return Fault(f"{place} has half a character, {half}, in {column!r}", CONVERT)
    if len(value) > LONGEST_TEXT:
        return Fault(f"{place}: {too_long(value)}", CLEAN)
    return Document(value)


def without_text(place: str, record: Any, column: str) -> Fault:
    """Returns the fault of a record without text in the field `column`, with the field that contains its text."""
    if not isinstance(record, dict):
        return Fault(f"{place} is {type(record).__name__}, not an object with a field {column!r}")
    fields = flattened(record)
    likely = likely_text(fields)
    length = len(fields[likely]) if likely else 0
    for name, value in record.items():
        is_longer = isinstance(value, list) and len(str(value)) > length
        if is_longer and not are_token_ids(value):
            reason = f"{place} has no {column!r}; most of its text is in the list {name!r}"
            return Fault(reason, CONVERT)
    if not likely:
        return Fault(f"{place} has no {column!r}, and no text in its fields: {_listed(record)}")
    reason = f"{place} has no {column!r}; it has: {_listed(fields)}"
    return Fault(reason, f"give --text_column={likely}")


def _listed(fields: dict[str, Any]) -> str:
    return ", ".join(list(fields)[:MAX_NAMES])


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def flattened(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested objects: {"document": {"text": x}} becomes {"document.text": x}."""
    fields: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict) and value:
            fields |= flattened(value, f"{prefix}{name}.")
        else:
            fields[f"{prefix}{name}"] = value
    return fields


def likely_text(fields: dict[str, Any]) -> str:
    """Returns the name of the field with the longest text, else of one with token ids; "" if there is neither."""
    texts = {name: len(value) for name, value in fields.items() if isinstance(value, str)}
    longest = max(texts, key=texts.__getitem__, default="")
    if longest:
        return longest
    return next((name for name, value in fields.items() if are_token_ids(value)), "")


def are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
