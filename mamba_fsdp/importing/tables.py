"""Reads tables with text or token ids: Parquet files, Arrow files, and datasets on the Hugging Face Hub."""

import logging
import math
import os
from collections.abc import Iterable, Iterator

import datasets
import pyarrow
import pyarrow.parquet
from pyarrow import types

from mamba_fsdp.importing.compression import peek_head
from mamba_fsdp.importing.inputs import Document, Fault, InputFile
from mamba_fsdp.importing.json_records import document_from_record
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.retry import open_with_retries

ROWS = 64  # the number of rows to read at a time
# Columns that are read if there is no column `text` and the user has not named another one.
TOKEN_COLUMNS = ("tokens", "input_ids")
# {column: the value for tokens that are excluded from the loss}
MASK_COLUMNS = {"labels": -100, "attention_mask": 0}
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

datasets.disable_progress_bars()
# Errors are reported by the messages of this program. The Hub library would also report each retry.
datasets.logging.set_verbosity(datasets.logging.CRITICAL)
logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)


# This program does not use the builders of `datasets` for text, JSON, CSV and Parquet. The text builder reads a file as a
# whole, or splits it at line breaks and changes these. The JSON builder fails if a field that is not needed is null in the
# first 10 MB and a text later, or is an object with changing fields. The CSV builder reads the wrong column if the rows, but
# not the header, end with a comma. The Parquet builder fails if a file has no rows, or `::` in its path.


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
        if peek_head(stream).startswith(b"ARROW1"):
            reader = pyarrow.ipc.open_file(stream)
            count = reader.num_record_batches
            yield from _documents_in(map(reader.get_batch, range(count)), file, options, count)
        elif end == END_OF_STREAM:
            yield from _documents_in(pyarrow.ipc.open_stream(stream), file, options)
        else:
            raise ValueError("the file is truncated or not an Arrow file; copy it again")


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
    """Yields the document in each row. In the Arrow files of fms-fsdp, each record batch is a document: a column of integers.

    count: the number of batches, or infinity if it is not known. Raises ValueError for damaged data, if the column is missing,
    and if tokens are excluded from the loss.
    """
    row = 0
    for number, batch in enumerate(batches):
        file.share_read = min(1.0, number / count)
        batch.validate(full=True)  # a damaged offset would read memory outside of the batch
        _check_no_mask(batch)
        column = _column_in(batch, options.text_column)
        top = column if column in batch.schema.names else column.partition(".")[0]
        if top not in batch.schema.names:
            first = next(iter(batch[:1].to_pylist()), dict.fromkeys(batch.schema.names))
            fault = document_from_record("the first row", first, column)
            assert isinstance(fault, Fault)
            raise ValueError(fault.message())
        values = batch[top].to_numpy(zero_copy_only=False)
        is_of_datasets = b"huggingface" in (batch.schema.metadata or {})  # and not of fms-fsdp
        is_document = types.is_integer(batch[top].type) and not is_of_datasets
        for value in [values] if is_document and file.kind == "arrow" else values:
            row += 1
            yield document_from_record(f"row {row:,}", {top: value}, column)


def _column_in(batch: pyarrow.RecordBatch, column: str) -> str:
    """Returns the name of the column to read: `column`, or a column in TOKEN_COLUMNS in place of a missing column `text`. The
    column that takes its place must contain lists or be the only column, because a column of numbers could be a count of
    tokens."""
    names = batch.schema.names
    if column != "text" or column in names:
        return column
    for name in TOKEN_COLUMNS:
        if name in names and (len(names) == 1 or hasattr(batch[name].type, "value_type")):
            return name
    return column


def _check_no_mask(batch: pyarrow.RecordBatch) -> None:
    """Raises ValueError if a row excludes tokens from the loss."""
    for column, value in MASK_COLUMNS.items():
        if column not in batch.schema.names or not hasattr(batch[column].type, "value_type"):
            continue
        flags = batch[column].flatten().to_numpy(zero_copy_only=False)
        if (flags == value).any():
            raise ValueError(
                f"the column {column} excludes tokens from the loss, but a token store can't record that; "
                "remove these tokens, or the column"
            )
