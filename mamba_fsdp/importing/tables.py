"""Reads the rows of tables: Parquet, Arrow and names on the Hugging Face Hub, with text or with lists of token ids."""

import logging
import mmap
import re
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
from pyarrow import compute, types

from mamba_fsdp.importing.inputs import Document, InputFile
from mamba_fsdp.importing.json_records import without_text
from mamba_fsdp.settings.dataset_config import DatasetConfig

ROWS = 64  # rows of a table that are read at a time
TOKEN_COLUMNS = ("tokens", "input_ids")  # used if there is no column `text`, the default
TEXT = re.compile("(large_)?(string|binary)(_view)?|null")  # names of types
UNCOUNTED = {"labels": -100, "attention_mask": 0}  # {column: its value for tokens without a loss}
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

datasets.disable_progress_bars()
datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our own message reports the error
logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # it would report each retry


# `datasets` has builders for text, JSON, CSV and Parquet, which are not used. Its builder for text reads a file whole, or
# cuts it at line breaks and changes these. For JSON it fails if another field is null in the first 10 MB and a text
# later, or is an object that changes its fields. For CSV it reads another column if the rows, but not the header, end
# with a comma. For Parquet it fails if a file has no rows, or `::` in its path.


def parquet_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    with open(file.name, "rb") as stream:  # Python opens it, since names need not be UTF-8
        rows = pyarrow.parquet.ParquetFile(stream)
        read = 0
        for batch in rows.iter_batches(batch_size=ROWS):
            read += batch.num_rows
            file.share_read = read / rows.metadata.num_rows
            yield from _documents_in(pyarrow.Table.from_batches([batch]), file, options)


def hub_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    rows = datasets.load_dataset(
        file.name, options.config or None, split=file.split, streaming=True
    )
    for table in rows.with_format("arrow").iter(batch_size=ROWS):
        yield from _documents_in(table, file, options)


def arrow_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    """Yields the documents of each record batch."""
    for batch in record_batches(file):
        yield from _documents_in(pyarrow.Table.from_batches([batch]), file, options)


def record_batches(source: InputFile) -> Iterator[pyarrow.RecordBatch]:
    with open(source.name, "rb") as file:  # Python opens it, since names need not be UTF-8
        whole = pyarrow.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if whole[:6].to_pybytes() == b"ARROW1":
            reader = pyarrow.ipc.open_file(whole)
            for number in range(reader.num_record_batches):
                source.share_read = number / reader.num_record_batches
                yield reader.get_batch(number)
        elif whole[-8:].to_pybytes() == END_OF_STREAM:
            yield from pyarrow.ipc.open_stream(whole)
        else:
            raise ValueError("it is cut short, or is not an Arrow file; copy it again")


def _documents_in(table: Any, file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    """Returns the documents in a table of a file: one in each row. fms-fsdp's Arrow files have a document in each
    record batch, as plain integers. Raises ValueError."""
    is_of_datasets = b"huggingface" in (table.schema.metadata or {})  # it writes no fms files
    column = _column_of(table, options.text_column)
    if file.kind == "arrow" and types.is_integer(column.type) and not is_of_datasets:
        return map(Document, [_plain_ids(column)])
    return map(Document, _rows_of(column))


def _column_of(table: Any, column: str) -> Any:
    """Returns a table's column. document.text is the field text of document.

    If `text` is missing, it is a column of tokens: one of lists, since a column of numbers can be a count, or the only
    one. Raises ValueError for a missing column, and for rows that leave tokens out of the loss.
    """
    _check_all_count(table)
    flat = table
    while column not in flat.column_names and any(map(types.is_struct, flat.schema.types)):
        flat = flat.flatten()
    names = flat.column_names
    for name in (column, *TOKEN_COLUMNS):
        if name not in names or column not in (name, "text"):
            continue
        array = flat[name].combine_chunks()
        if name == column or len(names) == 1 or hasattr(array.type, "value_type"):
            array.validate(full=True)  # wrong offsets would read foreign memory
            return _decoded(array)
    (row,) = table[:1].to_pylist() or [dict.fromkeys(names)]
    raise ValueError(without_text("its first row", row, column).message())


def _rows_of(array: Any) -> list[Any]:
    """Returns a column's rows as texts, or as token ids (n,) int64; a null row is "" or has no ids. Raises ValueError
    for rows of other values."""
    if not hasattr(array.type, "value_type"):
        if not TEXT.fullmatch(str(array.type)):
            raise ValueError(f"the column contains {array.type}, not text or lists of token ids")
        return array.cast(pyarrow.large_string()).fill_null("").to_pylist()
    lengths = compute.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    return np.split(_plain_ids(_decoded(array.flatten())), np.cumsum(lengths))[:-1]


def _decoded(array: Any) -> Any:
    """Returns the plain array of one that can list its values in a dictionary."""
    return array.dictionary_decode() if types.is_dictionary(array.type) else array


def _plain_ids(array: Any) -> np.ndarray:
    """Returns the token ids (n,) int64 in an array of integers. Raises ValueError for anything else."""
    if array.null_count:
        raise ValueError("it has null in place of a token")
    if len(array) and not types.is_integer(array.type):
        raise ValueError(f"it contains lists of {array.type}, not token ids")
    return array.to_numpy(zero_copy_only=False).astype(np.int64)


def _check_all_count(table: Any) -> None:
    """Raises ValueError for rows that leave tokens out of the loss."""
    for column, value in UNCOUNTED.items():
        if column not in table.column_names or not hasattr(table[column].type, "value_type"):
            continue
        flags = table[column].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        if (flags == value).any():
            raise ValueError(
                f"its {column} leave tokens out of the loss, which a token store can't record; "
                "remove these tokens, or that column"
            )
