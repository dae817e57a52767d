"""Reads the rows of tables: Parquet, Arrow and names on the Hugging Face Hub, with text or with lists of token ids."""

import logging
import math
import os
from collections.abc import Iterable, Iterator

import datasets
import pyarrow
import pyarrow.parquet
from pyarrow import types

from mamba_fsdp.importing.compression import peeked
from mamba_fsdp.importing.inputs import Document, Fault, InputFile
from mamba_fsdp.importing.json_records import field_of
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.retry import open_with_retries

ROWS = 64  # rows of a table that are read at a time
TOKEN_COLUMNS = (
    "tokens",
    "input_ids",
)  # read if the column `text` is missing and no other is named
UNCOUNTED = {"labels": -100, "attention_mask": 0}  # {column: its value for tokens without a loss}
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

datasets.disable_progress_bars()
datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our own message reports the error
logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # it would report each retry


# This program does not use the builders of `datasets` for text, JSON, CSV and Parquet. Its builder for text reads a file whole, or
# cuts it at line breaks and changes these. For JSON it fails if another field is null in the first 10 MB and a text
# later, or is an object that changes its fields. For CSV it reads another column if the rows, but not the header, end
# with a comma. For Parquet it fails if a file has no rows, or `::` in its path.


def parquet_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document | Fault]:
    with open_with_retries(file.name) as stream:
        rows = pyarrow.parquet.ParquetFile(stream)
        count = rows.metadata.num_rows / ROWS
        yield from _documents_in(rows.iter_batches(batch_size=ROWS), file, options, count)


def arrow_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document | Fault]:
    with open_with_retries(file.name) as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - len(END_OF_STREAM)))
        end = stream.read()
        stream.seek(0)
        if peeked(stream).startswith(b"ARROW1"):
            reader = pyarrow.ipc.open_file(stream)
            count = reader.num_record_batches
            yield from _documents_in(map(reader.get_batch, range(count)), file, options, count)
        elif end == END_OF_STREAM:
            yield from _documents_in(pyarrow.ipc.open_stream(stream), file, options)
        else:
            raise ValueError("it is cut short, or is not an Arrow file; copy it again")


def hub_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document | Fault]:
    rows = datasets.load_dataset(
        file.name, options.config or None, split=file.split, streaming=True
    )
    for table in rows.with_format("arrow").iter(batch_size=ROWS):
        yield from _documents_in(table.to_batches(), file, options)


def _documents_in(
    batches: Iterable[pyarrow.RecordBatch],
    file: InputFile,
    options: DatasetConfig,
    count: float = math.inf,
) -> Iterator[Document | Fault]:
    """Yields the document of each row. fms-fsdp's Arrow files have one in each record batch, as plain integers.

    count: the number of batches, if it is known. Raises ValueError.
    """
    row = 0
    for number, batch in enumerate(batches):
        file.share_read = min(1.0, number / count)
        batch.validate(full=True)  # wrong offsets would read foreign memory
        _check_all_count(batch)
        column = _column_in(batch, options.text_column)
        top = column if column in batch.schema.names else column.partition(".")[0]
        if top not in batch.schema.names:
            first = next(iter(batch[:1].to_pylist()), dict.fromkeys(batch.schema.names))
            fault = field_of("its first row", first, column)
            assert isinstance(fault, Fault)
            raise ValueError(fault.message())
        values = batch[top].to_numpy(zero_copy_only=False)
        is_of_datasets = b"huggingface" in (batch.schema.metadata or {})  # it writes no fms files
        is_document = types.is_integer(batch[top].type) and not is_of_datasets
        for value in [values] if is_document and file.kind == "arrow" else values:
            row += 1
            yield field_of(f"row {row:,}", {top: value}, column)


def _column_in(batch: pyarrow.RecordBatch, column: str) -> str:
    """Returns the column to read. If `text` is missing, it is a column of tokens: one of lists, since a column of numbers
    can be a count, or the only one."""
    names = batch.schema.names
    if column != "text" or column in names:
        return column
    for name in TOKEN_COLUMNS:
        if name in names and (len(names) == 1 or hasattr(batch[name].type, "value_type")):
            return name
    return column


def _check_all_count(batch: pyarrow.RecordBatch) -> None:
    """Raises ValueError for rows that leave tokens out of the loss."""
    for column, value in UNCOUNTED.items():
        if column not in batch.schema.names or not hasattr(batch[column].type, "value_type"):
            continue
        flags = batch[column].flatten().to_numpy(zero_copy_only=False)
        if (flags == value).any():
            raise ValueError(
                f"its {column} leave tokens out of the loss, but a token store can't record that; "
                "remove these tokens, or that column"
            )
