"""Reads the first row of a file that get_dataset.py imports, to show what its fields are called."""

import csv
import io
import itertools
import json
from typing import IO, Any

import pyarrow
import pyarrow.parquet

from mamba_fsdp.data.corpus import InputFile
from mamba_fsdp.data.reading import DELIMITERS
from mamba_fsdp.storage.signatures import unpacked

SHOWN = 1 << 12  # characters of a text


def first_row(file: InputFile) -> dict[str, Any]:
    """Returns {field: value} of the first row of a file, with the fields of objects in it as document.text; of a text, its
    start as `text`. Empty for a row without fields. Raises whatever the libraries do for a file that can't be read."""
    read = {"json": _json_row, "csv": _csv_row, "text": _text_row}.get(file.kind)
    with open(file.name, "rb") as stored:
        if read:
            row = read(io.TextIOWrapper(unpacked(stored), "utf-8-sig"))
        elif file.kind == "parquet":
            batches = pyarrow.parquet.ParquetFile(stored).iter_batches(batch_size=1)
            row = next(batches).to_pylist()[0]
        else:
            row = _arrow_row(stored)
    return flattened(row) if isinstance(row, dict) else {}


def _json_row(stream: IO[str]) -> Any:
    line = stream.readline()
    try:
        record = json.loads(line)
    except ValueError:  # it goes on after the line
        record = json.loads(line + stream.read())
    return record[0] if isinstance(record, list) and record else record


def _csv_row(stream: IO[str]) -> dict[str, str]:
    header = stream.readline()
    delimiter = max(DELIMITERS, key=header.count)
    return next(csv.DictReader(itertools.chain([header], stream), delimiter=delimiter))


def _text_row(stream: IO[str]) -> dict[str, str]:
    return {"text": stream.read(SHOWN)}


def _arrow_row(stored: IO[bytes]) -> dict[str, Any]:
    try:
        batch = pyarrow.ipc.open_file(stored).get_batch(0)
    except pyarrow.ArrowInvalid:  # not a file with an index, but a stream
        stored.seek(0)
        batch = pyarrow.ipc.open_stream(stored).read_next_batch()
    return batch[:1].to_pylist()[0]


def flattened(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {name: value} of a record's fields, of objects in it as document.text."""
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
    for name, value in fields.items():
        if isinstance(value, list) and value and all(type(token) is int for token in value):
            return name
    return ""
