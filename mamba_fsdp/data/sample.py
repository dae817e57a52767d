"""Reads the first row of a file that get_dataset.py imports, to show what its fields are called."""

from typing import Any

import pyarrow.parquet

from mamba_fsdp.data.corpus import InputFile
from mamba_fsdp.data.importers import record_batches
from mamba_fsdp.data.json_records import are_token_ids, flattened, records_in
from mamba_fsdp.data.reading import csv_rows
from mamba_fsdp.data.text_files import opened

SHOWN = 1 << 12  # characters of a text


def first_row(file: InputFile) -> dict[str, Any]:
    """Returns {field: value} of the first row of a file, with the fields of objects in it as document.text; of a text, its
    start as `text`. Empty for a row without fields. Raises whatever the libraries do for a file that can't be read."""
    row: Any = {}
    if file.kind == "json":
        row = next(records_in(file, "text")).value
    elif file.kind == "csv":
        with opened(file, newline="") as stream:
            row = next(csv_rows(stream))
    elif file.kind == "parquet":
        row = next(pyarrow.parquet.ParquetFile(file.name).iter_batches(batch_size=1)).to_pylist()[0]
    elif file.kind == "arrow":
        row = next(record_batches(file))[:1].to_pylist()[0]
    elif file.kind == "text":
        with opened(file) as stream:
            row = {"text": stream.read(SHOWN)}
    return flattened(row) if isinstance(row, dict) else {}


def likely_text(fields: dict[str, Any]) -> str:
    """Returns the name of the field with the longest text, else of one with token ids; "" if there is neither."""
    texts = {name: len(value) for name, value in fields.items() if isinstance(value, str)}
    longest = max(texts, key=texts.__getitem__, default="")
    if longest:
        return longest
    for name, value in fields.items():
        if are_token_ids(value):
            return name
    return ""
