"""Reads the records of JSON files, one a line or not, and finds the text in a record."""

import itertools
import json
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mamba_fsdp.data.corpus import InputFile
from mamba_fsdp.data.text_files import converting, opened
from mamba_fsdp.errors import first_line

MOST_NAMES = 10  # of fields in one message
CHATS = (("role", "content"), ("from", "value"))  # fields of a message in a chat
DECODER = json.JSONDecoder()
WHITE_SPACE = " \t\n\r"
ROWS_OF_LINES = "map(json.loads, sys.stdin)"


class Record(NamedTuple):
    """A record of a file."""

    place: str  # in words
    value: Any
    rows: str = ""  # the Python expression of the file's records, from standard input; "" if it is not a short one


class Convertible(ValueError):
    """The error for a record without text, of which a Python expression of the record `row` makes one with text."""

    def __init__(self, message: str, expression: str) -> None:
        super().__init__(message)
        self.expression = expression


def texts_in(file: InputFile, column: str) -> Iterator[str | np.ndarray]:
    """Yields what `column` names in each record of a JSON file. Raises ValueError, which says what to do."""
    for record in records_in(file, column):
        try:
            yield field_of(record.place, record.value, column)
        except Convertible as error:
            command = "jq -c ."  # makes lines, for which the next message has a command
            if record.rows:
                program = f"import json, sys; [print({error.expression}) for row in {record.rows}]"
                command = f"python3 -c {shlex.quote(program)}"
            raise ValueError(f"{error}: {converting(file.name, command)}") from None


def records_in(file: InputFile, column: str) -> Iterator[Record]:
    """Yields the records of a file with one on each line. A file with a single value, such as a list of records, or
    with values over several lines is read whole."""
    with opened(file) as stream:
        beginning = []  # the lines up to the second that is not blank
        filled: list[str] = []
        while len(filled) < 2:
            line = stream.readline()
            if not line:
                break
            beginning.append(line)
            if not line.isspace():
                filled.append(line.strip())
        if len(filled) == 1 or filled and (filled[0][0] == "[" or filled[0][-1] in "{[,"):
            yield from _read_whole(file, "".join(beginning) + stream.read(), column)
            return
        for number, line in enumerate(itertools.chain(beginning, stream), 1):
            if not line.isspace():
                for value in _parsed(f"line {number}", line):
                    yield Record(f"line {number}", value, ROWS_OF_LINES)


def _read_whole(file: InputFile, text: str, column: str) -> Iterator[Record]:
    values = _parsed("it", text)
    rows = ""
    if len(values) == 1:
        (value,) = values
        rows = "[json.load(sys.stdin)]"
        if isinstance(value, dict):
            values = _rows_within(value, column)
        if isinstance(value, list):
            values = value
            rows = "json.load(sys.stdin)"
    for number, value in enumerate(values, 1):
        file.share_read = number / len(values)
        yield Record(f"record {number}", value, rows)


def _rows_within(value: dict[str, Any], column: str) -> list[Any]:
    """Returns the rows that a file's only object holds: the values of its column, which may be numbered, or its only
    list of objects; else the object itself is the row."""
    texts = value.get(column)
    if isinstance(texts, dict) and all(map(str.isdecimal, texts)):
        texts = list(texts.values())
    if isinstance(texts, list) and all(
        text is None or isinstance(text, (str, list)) for text in texts
    ):
        return texts
    tables = [rows for rows in value.values() if _is_table(rows) and not _chat_fields(rows)]
    if column not in value and len(tables) == 1:
        return tables[0]
    return [value]


def _parsed(place: str, text: str) -> list[Any]:
    """Returns the values in a text, usually one. Raises ValueError."""
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError) as error:
        if not str(error).startswith("Extra data"):
            raise ValueError(f"{place} is not JSON: {first_line(error)}") from None
    values = []
    at = len(text) - len(text.lstrip(WHITE_SPACE))
    while at < len(text):
        try:
            value, end = DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place} is not JSON: {first_line(error)}") from None
        values.append(value)
        rest = text[end : end + 1]
        at = end
        while rest and rest in WHITE_SPACE:
            at += 1
            rest = text[at : at + 1]
    return values


def field_of(place: str, record: Any, column: str) -> str | np.ndarray:
    """Returns what `column` names in a record: text, or token ids; "" for null. document.text is the field text of
    document. A record without fields is its own text. Raises ValueError."""
    value = record
    fields = record if isinstance(record, dict) else {}
    names = [column] if column in fields else column.split(".")
    if isinstance(record, (str, list)):
        names = []
    for name in names:
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif value is not None:
            raise _without_text(place, record, column)
    if value is None:
        return ""
    if isinstance(value, list) and all(type(token) is int for token in value):
        return np.array(value, dtype=np.int64)
    if isinstance(value, dict):
        raise _without_text(place, record, column)
    if not isinstance(value, str):
        raise _no_text(f"{place}: {column!r}", value, names)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])
        raise Convertible(
            f"{place} has half a character, {half}, in {column!r}; with a question mark for each",
            'json.dumps(row, ensure_ascii=False).encode(errors="replace").decode()',
        ) from None
    return value


def _without_text(place: str, record: Any, column: str) -> ValueError:
    """Returns the error for a record without the field that `column` names."""
    if not isinstance(record, dict):
        return ValueError(
            f"{place} is {type(record).__name__}, not an object with a field {column!r}"
        )
    for name, value in record.items():
        if _chat_fields(value):
            return _no_text(f"{place}: {name!r}", value, [name])
    fields = flattened(record).items()
    names = [name for name, text in fields if isinstance(text, str) or are_token_ids(text)]
    if not names:
        return ValueError(
            f"{place} has no {column!r}, and no text in what it has: {', '.join(record)}"
        )
    which = "name one with --text_column"
    if len(names) == 1:
        which = f"give --text_column={names[0]}"
    return ValueError(
        f"{place} has no {column!r}; it has: {', '.join(names[:MOST_NAMES])}; {which}"
    )


def _no_text(place: str, value: Any, names: list[str]) -> ValueError:
    """Returns the error for a value that is neither text nor token ids. names: those that lead to it in the record."""
    field = "row" + "".join(f"[{json.dumps(name)}]" for name in names)
    chat = _chat_fields(value)
    if chat:
        speaker, words = chat
        lines = f'm["{speaker}"] + ": " + str(m["{words}"] or "") for m in {field}'
        return Convertible(
            f"{place} is a chat; make text of it in the form that you want, such as",
            f'json.dumps({{"text": "\\n".join({lines})}})',
        )
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return Convertible(
            f"{place} is a list of texts; join them",
            f'json.dumps({{"text": "\\n".join({field})}})',
        )
    return ValueError(f"{place} is {type(value).__name__}, not text or token ids")


def _chat_fields(value: Any) -> tuple[str, str] | None:
    """Returns the fields of the messages in a chat that name the speaker and what was said; None if it is no chat."""
    if not _is_table(value):
        return None
    for speaker, words in CHATS:
        if all(isinstance(m.get(speaker), str) and words in m for m in value):
            return speaker, words
    return None


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def flattened(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {name: value} of a record's fields, of objects in it as document.text."""
    fields: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict) and value:
            fields |= flattened(value, f"{prefix}{name}.")
        else:
            fields[f"{prefix}{name}"] = value
    return fields


def are_token_ids(value: Any) -> bool:
    """Returns whether a field holds token ids."""
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
