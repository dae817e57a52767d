"""Reads the records of JSON files, one a line or not, and finds the text in a record."""

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
    LONGEST_LINE,
    LONGEST_TEXT,
    lines_of,
    opened,
    too_long,
)
from mamba_fsdp.settings.dataset_config import DatasetConfig

MAX_NAMES = 10  # fields in one message
DECODER = json.JSONDecoder()
VALUE = re.compile(r"[^ \t\n\r]")  # the first character of a value


def json_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document | Fault]:
    """Yields the text of each record. Usually a file has one record on each line. A file with a single value, such as a list
    of records, or with values over several lines is read whole. Raises ValueError if that is not possible."""
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
            yield from _documents_of_whole(file, text, options.text_column)
            return
        for number, line in enumerate(itertools.chain(beginning, lines), 1):
            place = f"line {number:,}"
            try:
                values = _parsed(place, line)
            except ValueError as error:
                yield Fault(str(error))
            else:
                yield from [field_of(place, value, options.text_column) for value in values]


def _documents_of_whole(file: InputFile, text: str, column: str) -> Iterator[Document | Fault]:
    if len(text) >= LONGEST_LINE:
        raise ValueError(f"one value of {LONGEST_LINE:,} characters or more; {CLEAN}")
    values = _parsed("it", text)
    if len(values) == 1:
        values = _rows_within(values[0], column)
    for number, value in enumerate(values, 1):
        file.share_read = number / len(values)
        yield field_of(f"record {number:,}", value, column)


def _rows_within(value: Any, column: str) -> list[Any]:
    """Returns the rows in the only value of a file.

    A list consists of rows. An object contains rows if it has a list of texts in `column` (pandas writes an object with
    numbered fields instead), if exactly one of its fields is a list of objects, or if all its fields are objects. Any other
    value is itself the row.
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
    tables = [rows for rows in candidates if _is_table(rows)]
    return tables[0] if len(tables) == 1 else [value]


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


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
    names = [column] if isinstance(record, dict) and column in record else column.split(".")
    if isinstance(record, (str, list)):
        names = []
    for name in names:
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif value is not None:
            return _without_text(place, record, column)
    if isinstance(value, dict):
        return _without_text(place, record, column)
    if value is None:
        return Document("")
    if not isinstance(value, str):
        ids = token_ids(value)
        if ids is not None:
            return Document(ids)
        found = getattr(value, "dtype", type(value).__name__)
        return Fault(f"{place}: {column!r} is {found}, not text or token ids", CONVERT)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])
        return Fault(f"{place} has half a character, {half}, in {column!r}", CONVERT)
    if len(value) > LONGEST_TEXT:
        return Fault(f"{place}: {too_long()}")
    return Document(value)


def token_ids(value: Any) -> np.ndarray | None:
    """Returns the token ids (n,) int64 in a list or an array; None if it is or contains anything else."""
    is_list = isinstance(value, list) and all(type(token) is int for token in value)
    is_array = isinstance(value, np.ndarray) and (value.dtype.kind in "iu" or not len(value))
    return np.asarray(value, np.int64) if is_list or is_array else None


def _without_text(place: str, record: Any, column: str) -> Fault:
    """Returns the fault of a record without text in the field `column`, with the field that contains its text."""
    if not isinstance(record, dict):
        return Fault(f"{place} is {type(record).__name__}, not an object with a field {column!r}")
    fields = _flattened(record)
    likely = likely_text(fields)
    reason = f"{place} has no {column!r}"
    if likely and isinstance(fields[likely], list) and token_ids(fields[likely]) is None:
        return Fault(f"{reason}; most of its text is in the list {likely!r}", CONVERT)
    reason += f"; it has: {', '.join(list(fields)[:MAX_NAMES])}"
    return Fault(reason, f"give --text_column={likely}" if likely else "")


def _flattened(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested objects: {"document": {"text": x}} becomes {"document.text": x}."""
    fields: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict) and value:
            fields |= _flattened(value, f"{prefix}{name}.")
        else:
            fields[f"{prefix}{name}"] = value
    return fields


def likely_text(fields: dict[str, Any]) -> str:
    """Returns the name of the field with the longest text or list of texts, else of a field with token ids; "" if there is
    neither."""
    sizes = {}
    for name, value in fields.items():
        if isinstance(value, (str, list)) and value:
            sizes[name] = 0 if token_ids(value) is not None else len(str(value))
    return max(sizes, key=sizes.__getitem__, default="")
