"""Reads others' tokens: columns of tables, fms-fsdp's Arrow files, Composer's DataLayout."""

import json
import mmap
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import compute, types

from mamba_fsdp.data.corpus import Document, InputFile
from mamba_fsdp.data.json_records import Convertible, field_of
from mamba_fsdp.errors import counted
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.signatures import HEAD, signature_of

TOKEN_COLUMNS = ("tokens", "input_ids")  # tried if there is no column `text`, the default
TEXT = re.compile("(large_)?(string|binary)(_view)?|null")  # names of types
UNCOUNTED = {"labels": -100, "attention_mask": 0}  # {column: its value for tokens without a loss}
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
HIGHEST_POSITION = (1 << 14) - 1  # in DataLayout
WINDOW = 1 << 20  # tokens of DataLayout read at a time


def documents_in(table: Any, file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    """Returns the documents in a table of a file: one in each row, or, of fms-fsdp's Arrow files, one in all. Raises
    ValueError, which says what to do."""
    is_of_datasets = b"huggingface" in (table.schema.metadata or {})  # it writes no fms files
    try:
        column = column_of(table, options.text_column)
        if file.kind == "arrow" and types.is_integer(column.type) and not is_of_datasets:
            return map(Document, [plain_ids(column)])
        return map(Document, rows_of(column))
    except ValueError as error:
        raise _with_command(error, table, file, options) from None


def _with_command(
    error: ValueError, table: Any, file: InputFile, options: DatasetConfig
) -> ValueError:
    """Returns the error, or, if text can be made of the rows, one with a command that makes it."""
    try:
        for row in table[:1].to_pylist():
            field_of("its first row", row, options.text_column)
    except Convertible as found:
        source = f'"{file.kind}", data_files={json.dumps(file.name)}, split="train"'
        if file.kind == "hub":
            source = f"{json.dumps(file.name)}, {options.config or None!r}, split={file.split!r}"
        rows = f"datasets.load_dataset({source}, streaming=True)"
        program = f"import datasets, json; [print({found.expression}) for row in {rows}]"
        command = shlex.join([sys.executable, "-c", program])
        written = f"{os.path.splitext(file.name)[0].rpartition('/')[2]}.jsonl"
        return ValueError(f"{found}: {command} > {shlex.quote(written)}")
    except ValueError:  # it says no more than the error
        pass
    return error


def column_of(table: Any, column: str) -> Any:
    """Returns a table's column. document.text is the field text of document.

    If `text` is missing, it is a column of tokens: one of lists, since a column of numbers may count them, or the only
    one. Raises ValueError for a missing column, and for rows that leave tokens out of the loss.
    """
    check_all_count(table)
    while column not in table.column_names and any(map(types.is_struct, table.schema.types)):
        table = table.flatten()
    names = table.column_names
    for name in (column, *TOKEN_COLUMNS):
        if name not in names or column not in (name, "text"):
            continue
        array = table[name].combine_chunks()
        if name == column or len(names) == 1 or hasattr(array.type, "value_type"):
            array.validate(full=True)  # wrong offsets would read foreign memory
            return _decoded(array)
    raise ValueError(
        f"there is no column {column!r}; it has: {', '.join(names)}; name one with --text_column"
    )


def rows_of(array: Any) -> list[Any]:
    """Returns a column's rows as texts, or as token ids (n,) int64; a null row is "" or has no ids. Raises ValueError
    for rows that are neither."""
    if not hasattr(array.type, "value_type"):
        if not TEXT.fullmatch(str(array.type)):
            raise ValueError(f"the column holds {array.type}, not text or lists of token ids")
        return array.cast(pyarrow.large_string()).fill_null("").to_pylist()
    lengths = compute.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    return np.split(plain_ids(_decoded(array.flatten())), np.cumsum(lengths))[:-1]


def _decoded(array: Any) -> Any:
    """Returns the plain array of one that may list its values in a dictionary."""
    return array.dictionary_decode() if types.is_dictionary(array.type) else array


def plain_ids(array: Any) -> np.ndarray:
    """Returns the token ids (n,) int64 in an array of integers. Raises ValueError for anything else."""
    if array.null_count:
        raise ValueError("it has null in place of a token")
    if len(array) and not types.is_integer(array.type):
        raise ValueError(f"it holds lists of {array.type}, not token ids")
    return array.to_numpy(zero_copy_only=False).astype(np.int64)


def check_all_count(table: Any) -> None:
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


# Arrow files. fms-fsdp's hold a document in each record batch, as plain integers; others a document in each row.


def arrow_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    """Yields the documents of each record batch."""
    for batch in record_batches(file):
        yield from documents_in(pyarrow.Table.from_batches([batch]), file, options)


def record_batches(source: InputFile) -> Iterator[pyarrow.RecordBatch]:
    with open(source.name, "rb") as file:  # by Python, since names may not be UTF-8
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


# DataLayout: FILE.npy of little-endian int32 without a header, FILE.npy.size with their number. Bits 0 to 15 are the
# token, 16 to 29 its position in its document, 30 says whether it counts in the loss. Positions have 14 bits: in longer
# documents they begin at 0 again, or stay at the highest.


def datalayout_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    """Yields the documents window by window. Raises ValueError for tokens that are left out of the loss."""
    _check_size(file.name)
    entries = np.memmap(file.name, "<i4", "r")
    eos = int(options.eos_token) if options.eos_token.isdecimal() else -1
    for start in range(0, len(entries), WINDOW):
        file.share_read = start / len(entries)
        first = max(0, start - 1)
        window = np.array(entries[first : start + WINDOW + 1])  # with a neighbour at each end
        body = entries[start : start + WINDOW]
        end = start + len(body)
        positions = body >> 16 & HIGHEST_POSITION
        if ((positions > 0) & (body >> 30 & 1 == 0)).any():
            raise ValueError(
                "it leaves tokens out of the loss (bit 30), which a token store can't record; set that bit, or leave "
                "these tokens out"
            )
        bounds = {0, len(entries), *(document_starts(window, eos) + first).tolist()}
        inner = sorted(bound for bound in bounds if start < bound < end)
        edges = [start, *inner, end]
        for begin, stop in zip(edges, edges[1:]):
            ids = (entries[begin:stop] & 0xFFFF).astype(np.int64)
            yield Document(ids, begin in bounds, stop in bounds)


def document_starts(entries: np.ndarray, eos: int) -> np.ndarray:
    """Returns the starts of documents in `entries` (n,), without the first entry.

    A document begins wherever a position is not one more than the previous one. There are two exceptions after the
    highest position, which a long document reaches: the position may stay there, or restart at 0. At 0 a new document
    begins only if the one before ended with `eos` or has stayed at the highest position.
    """
    positions = entries >> 16 & HIGHEST_POSITION
    before = positions[:-1]
    after = positions[1:]
    has_ended = (entries[:-1] & 0xFFFF) == eos
    has_stayed = np.append(False, before[:-1] == HIGHEST_POSITION)[: len(before)]
    wraps = (before == HIGHEST_POSITION) & (after == 0) & ~has_ended & ~has_stayed
    stays = (before == HIGHEST_POSITION) & (after == HIGHEST_POSITION)
    return np.flatnonzero((after != before + 1) & ~wraps & ~stays) + 1


def _check_size(name: str) -> None:
    size_file = Path(f"{name}.size")
    size = Path(name).stat().st_size
    if not size_file.exists():
        with open(name, "rb") as file:
            found = signature_of(file.read(HEAD))
        if found:
            raise ValueError(f"it is {found.title}, not DataLayout; {found.advice(name)}")
        raise ValueError(
            f"{size_file.name}, which says how many tokens it holds, is missing; copy it too"
        )
    count = int(size_file.read_text())
    if size != 4 * count or not count:
        raise ValueError(
            f"{size} bytes, but {size_file.name} says {counted(count, 'token')} of 4 bytes; copy both again"
        )
