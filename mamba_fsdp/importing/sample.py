"""Reads the first row of a file that get_dataset.py imports, to show the names of its fields."""

from typing import Any

import pyarrow.parquet

from mamba_fsdp.importing.csv_files import csv_rows
from mamba_fsdp.importing.inputs import InputFile
from mamba_fsdp.importing.json_records import flattened, records_in
from mamba_fsdp.importing.tables import record_batches
from mamba_fsdp.importing.text_files import opened
from mamba_fsdp.settings.dataset_config import DatasetConfig

SHOWN = 1 << 12  # characters of a text


def first_row(file: InputFile, options: DatasetConfig) -> dict[str, Any]:
    """Returns {field: value} of the first row of a file, with the fields of objects in it as document.text; of a text,
    its start as `text`. Empty for a row without fields. Raises the library's error for a file that can't be read."""
    row: Any = {}
    if file.kind == "json":
        row = getattr(next(records_in(file, options)), "value", {})
    elif file.kind == "csv":
        with opened(file, options.encoding, newline="") as stream:
            row = next(csv_rows(stream))
    elif file.kind == "parquet":
        row = next(pyarrow.parquet.ParquetFile(file.name).iter_batches(batch_size=1)).to_pylist()[0]
    elif file.kind == "arrow":
        row = next(record_batches(file))[:1].to_pylist()[0]
    elif file.kind == "text":
        with opened(file, options.encoding) as stream:
            row = {"text": stream.read(SHOWN)}
    return flattened(row) if isinstance(row, dict) else {}
