"""Reads the records of JSON files in several layouts, and finds the text in a record."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from mamba_fsdp.errors import first_line
from mamba_fsdp.importing.inputs import Document, Fault, InputFile
from mamba_fsdp.importing.kinds import CLEAN, CONVERT
from mamba_fsdp.importing.text_files import (
    MAX_LINE_LENGTH,
    MAX_TEXT_LENGTH,
    open_text,
    read_lines,
    too_long_message,
)
from mamba_fsdp.settings.dataset_config import DatasetConfig

MAX_NAMES = 10  # maximum number of fields to list in a message
DECODER = json.JSONDecoder()
VALUE = re.compile(r"[^ \t\n\r]")  # matches the first character of a value


def json_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document | Fault]:
    """Yields the text of each record.

    Usually a file has one record per line. A file with a single value, such as a list of records, and a file with values that
    span several lines are read as a whole. Raises ValueError if such a file is too long or not JSON."""
    with open_text(file, options.encoding) as stream:
        lines = read_lines(stream)
        beginning = []  # the lines up to the second line that is not blank
        filled: list[str] = []  # the lines in `beginning` that are not blank
        for line in lines:
            beginning.append(line)
            if not line.isspace():
                filled.append(line.strip())
            if len(filled) == 2:
                break
        if len(filled) == 1 or filled and (filled[0][0] == "[" or filled[0][-1] in "{[,"):
            text = "".join(beginning) + stream.read(MAX_LINE_LENGTH)
            yield from _documents_of_whole(file, text, options.text_column)
            return
        for number, line in enumerate(itertools.chain(beginning, lines), 1):
            place = f"line {number:,}"
            try:
                values = _parse_values(place, line)
            except ValueError as error:
                yield Fault(str(error))
            else:
                yield from [
                    document_from_record(place, value, options.text_column) for value in values
                ]


def _documents_of_whole(file: InputFile, text: str, column: str) -> Iterator[Document | Fault]:
    if len(text) >= MAX_LINE_LENGTH:
        raise ValueError(f"one value has {MAX_LINE_LENGTH:,} characters or more; {CLEAN}")
    values = _parse_values("the file", text)
    if len(values) == 1:
        values = _rows_within(values[0], column)
    for number, value in enumerate(values, 1):
        file.share_read = number / len(values)
        yield document_from_record(f"record {number:,}", value, column)


def _rows_within(value: Any, column: str) -> list[Any]:
    """Returns the rows in the only value of a file.

    The items of a list are rows. An object contains rows in three cases: its field `column` is a list of texts (or an object
    with numbered fields, as pandas writes it), exactly one of its fields is a list of objects, or all its fields are objects.
    Any other value is the only row.
    """
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        return [value]
    if column.partition(".")[0] in value:
        texts: Any = value.get(column)
        if isinstance(texts, dict) and all(map(str.isdecimal, texts)):
            texts = list(texts.values())
        is_column = isinstance(texts, list) and (not texts or token_ids(texts) is None)
        return texts if is_column else [value]
    candidates = [list(value.values()), *value.values()]
    lists = [rows for rows in candidates if isinstance(rows, list) and rows]
    tables = [rows for rows in lists if all(isinstance(row, dict) for row in rows)]
    return tables[0] if len(tables) == 1 else [value]


def _parse_values(place: str, text: str) -> list[Any]:
    """Returns the JSON values in a text. Usually there is one. Raises ValueError if the text is not valid JSON.

    place: describes the text in the message."""
    values = []
    at = 0
    try:
        while start := VALUE.search(text, at):
            value, at = DECODER.raw_decode(text, start.start())
            values.append(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {first_line(error)}") from None
    return values


def document_from_record(place: str, record: Any, column: str) -> Document | Fault:
    """Returns the text or the token ids in the field `column` of a record, or a Fault. The text of null is "".

    place: describes the record in messages. record: an object, or a text or list that is itself the content. column: the name of
    a field; document.text can also be the field `text` of the object `document`."""
    value = record
    names = [column] if isinstance(record, dict) and column in record else column.split(".")
    if isinstance(record, (str, list)):
        names = []
    for name in names:
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif value is not None:
            return _missing_text_fault(place, record, column)
    if isinstance(value, dict):
        return _missing_text_fault(place, record, column)
    if value is None:
        return Document("")
    if not isinstance(value, str):
        ids = token_ids(value)
        if ids is not None:
            return Document(ids)
        found = getattr(value, "dtype", type(value).__name__)
        return Fault(f"{place}: {column!r} is of type {found}, not text or token ids", CONVERT)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])
        return Fault(f"{place} has half of a surrogate pair, {half}, in {column!r}", CONVERT)
    if len(value) > MAX_TEXT_LENGTH:
        return Fault(f"{place}: {too_long_message()}")
    return Document(value)


def token_ids(value: Any) -> np.ndarray | None:
    """Returns the token ids (n,) int64 of a list or an array of integers; None for any other value."""
    is_list = isinstance(value, list) and all(type(token) is int for token in value)
    is_array = isinstance(value, np.ndarray) and (value.dtype.kind in "iu" or not len(value))
    return np.asarray(value, np.int64) if is_list or is_array else None


def _missing_text_fault(place: str, record: Any, column: str) -> Fault:
    """Returns the Fault of a record without text in the field `column`. Its advice names the field that contains the text."""
    if not isinstance(record, dict):
        return Fault(
            f"{place} is of type {type(record).__name__}, not an object with a field {column!r}"
        )
    fields = _flatten(record)
    likely = find_text_field(fields)
    reason = f"{place} has no {column!r}"
    if likely and isinstance(fields[likely], list) and token_ids(fields[likely]) is None:
        return Fault(f"{reason}; most of its text is in the list {likely!r}", CONVERT)
    reason += f"; it has: {', '.join(list(fields)[:MAX_NAMES])}"
    return Fault(reason, f"give --text_column={likely}" if likely else "")


def _flatten(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested objects: {"document": {"text": x}} becomes {"document.text": x}."""
    fields: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict) and value:
            fields |= _flatten(value, f"{prefix}{name}.")
        else:
            fields[f"{prefix}{name}"] = value
    return fields


def find_text_field(fields: dict[str, Any]) -> str:
    """Returns the name of the field with the longest text or list of texts. If there is none, returns the name of a field with
    token ids, or ""."""
    sizes = {}
    for name, value in fields.items():
        if isinstance(value, (str, list)) and value:
            sizes[name] = 0 if token_ids(value) is not None else len(str(value))
    return max(sizes, key=sizes.__getitem__, default="")
