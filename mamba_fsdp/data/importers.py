"""Reads others' tokens: columns of tables, fms-fsdp's Arrow files, flat files, Megatron's, Composer's DataLayout."""

import json
import mmap
import os
import re
import shlex
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import compute, types

from mamba_fsdp.data.corpus import Document, InputFile
from mamba_fsdp.data.json_records import Convertible, field_of
from mamba_fsdp.errors import counted, first_line
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.signatures import HEAD, LLM_C, NUMPY, signature_of

TOKEN_COLUMNS = ("tokens", "input_ids")  # tried if there is no column `text`, the default
TEXT = re.compile("(large_)?(string|binary)(_view)?|null")  # names of types
UNCOUNTED = {"labels": -100, "attention_mask": 0}  # {column: its value for tokens without a loss}
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
HIGHEST_POSITION = (1 << 14) - 1  # in DataLayout
WINDOW = 1 << 20  # tokens of a mapped file read at a time
LLM_C_HEADER = 1024  # bytes: 256 numbers, which begin with its kind, version and count of tokens
LLM_C_TYPES = {20240520: "<u2", 20240801: "<u4"}  # by kind: of GPT-2's tokens, of Llama 3's
MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type of the ids, sequences, documents
MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


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


# Files of ids are mapped, and read window by window.


def cut(
    file: InputFile, ids: np.ndarray, bounds_in: Callable[[int, int], np.ndarray]
) -> Iterator[Document]:
    """Yields the documents of `ids` (n,).

    bounds_in(start, end) returns where, in [start, end], a document ends and the next one begins; it may return other
    bounds too.
    """
    count = len(ids)
    for start in range(0, count, WINDOW):
        file.share_read = start / count
        end = min(start + WINDOW, count)
        bounds = {0, count, *bounds_in(start, end).tolist()}
        inner = sorted(bound for bound in bounds if start < bound < end)
        edges = [start, *inner, end]
        window = np.asarray(ids[start:end]).astype(np.int64)  # slices of a map take longer
        for begin, stop in zip(edges, edges[1:]):
            yield Document(window[begin - start : stop - start], begin in bounds, stop in bounds)


def _mapped(path: str | Path, dtype: Any, count: int, source: str, offset: int = 0) -> np.ndarray:
    """Maps the `count` ids after `offset` bytes. Raises ValueError if the file has another size than `source`, its
    header or the file next to it, says."""
    dtype = np.dtype(dtype)
    size = Path(path).stat().st_size
    if size != offset + count * dtype.itemsize or not count:
        raise ValueError(
            f"{size} bytes, but {source} says {counted(count, 'token')} of {counted(dtype.itemsize, 'byte')}; copy "
            "again what is cut short, or belongs to another file"
        )
    return np.memmap(path, dtype, "r", offset)


def _eos_id(options: DatasetConfig) -> int:
    """Returns the id of the token that ends documents, -1 if it is not known."""
    return int(options.eos_token) if options.eos_token.isdecimal() else -1


# Flat files: ids one after the other. llm.c's and NumPy's begin with a header that says their type; nanoGPT's and
# OLMo's have none.


def flat_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    """Yields the texts between one eos and the next, or the rows of an array of two dimensions."""
    ids = _flat_ids(file.name, options.dtype)
    eos = _eos_id(options)

    def ends_in(start: int, end: int) -> np.ndarray:
        first = max(0, start - 1)
        return np.flatnonzero(ids[first:end] == eos) + first + 1

    if ids.ndim == 2:
        yield from map(Document, (row.astype(np.int64) for row in ids))
    else:
        yield from cut(file, ids, ends_in)


def _flat_ids(name: str, dtype: str) -> np.ndarray:
    """Maps the ids, of the type that a header says, or else `dtype`. Raises ValueError if the type is not known, or does
    not fit."""
    with open(name, "rb") as stream:
        found = signature_of(stream.read(HEAD), text_may_be_a_page=False)
    if found is None:
        return _ids_without_header(name, dtype)
    if found.name == NUMPY:
        ids = _numpy_array(name)
    elif found.name == LLM_C:
        magic, _, count = np.fromfile(name, "<i4", 3).tolist()
        ids = _mapped(name, LLM_C_TYPES[magic], count, "its header", LLM_C_HEADER)
    else:
        raise ValueError(f"it is {found.title}; {found.advice(name)}")
    _check_dtype(ids, dtype, "header")
    return ids


def _check_dtype(ids: np.ndarray, dtype: str, source: str) -> None:
    if dtype not in ("auto", ids.dtype.name):
        raise ValueError(f"its {source} says {ids.dtype.name}: leave out --dtype={dtype}")


def _ids_without_header(name: str, dtype: str) -> np.ndarray:
    if dtype == "auto":
        raise ValueError(
            "it does not say how its ids are stored: give their type, as in --dtype=uint16 (nanoGPT's) or uint32, and "
            "--tokenizer, or --tokenizer=none --eos_token=ID --vocab_size=N (Megatron's come with a file .idx, DataLayout "
            "with .npy.size)"
        )
    if Path(name).with_name("index.json").exists():
        raise ValueError("index.json next to it says that it is not a flat file; name its folder")
    size = Path(name).stat().st_size
    if size % np.dtype(dtype).itemsize:
        raise ValueError(
            f"{size} bytes are no whole number of {dtype}: it is cut short, or its ids have another type"
        )
    ids = np.memmap(name, dtype, "r")
    head = ids[:WINDOW]
    if head.any() and len(head) > 1 and not head[1::2].any():
        raise ValueError(f"every second id is 0: its ids are wider than {dtype}")
    return ids


def _numpy_array(name: str) -> np.ndarray:
    """Maps the array of one or two dimensions in a file of NumPy's."""
    try:
        array = np.load(name, mmap_mode="r")
    except ValueError as error:
        raise ValueError(
            f"it is cut short, or no plain array ({first_line(error)}); save its ids again"
        ) from error
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or 0 in array.shape:
        raise ValueError(
            f"it is an array of {array.dtype} of the shape {array.shape}; wanted are token ids: integers in "
            "one dimension, or in rows"
        )
    return array


# Megatron: FILE.bin of ids, FILE.idx with the sequences' lengths and the numbers of each document's first sequence.


def megatron_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    """Yields the documents that the index lists. Raises ValueError if it does not fit."""
    path = Path(file.name)
    index = path.with_suffix(".idx")
    dtype, lengths, offsets, documents = _megatron_index(index)
    starts = np.append(0, np.cumsum(lengths, dtype=np.int64))
    ids = _mapped(path, dtype, int(starts[-1]), index.name)
    _check_dtype(ids, options.dtype, "index")
    is_in_order = (lengths >= 0).all() and np.array_equal(starts[:-1] * ids.itemsize, offsets)
    is_whole = len(documents) and documents[0] == 0 and documents[-1] == len(lengths)
    if not (is_in_order and is_whole and (np.diff(documents) >= 0).all()):
        raise ValueError(
            f"{index.name} does not list its documents one after the other; write both again"
        )
    bounds = starts[documents]

    def bounds_in(start: int, end: int) -> np.ndarray:
        return bounds[bounds.searchsorted(start) : bounds.searchsorted(end, "right")]

    yield from cut(file, ids, bounds_in)


def _megatron_index(path: Path) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (the ids' type, the sequences' lengths, their offsets in bytes, the documents' first sequences)."""
    content = np.memmap(path, np.uint8, "r")
    head = content[: MEGATRON_HEADER.size].tobytes().ljust(MEGATRON_HEADER.size)
    magic, version, code, sequences, documents = MEGATRON_HEADER.unpack(head)
    size = len(head) + 12 * sequences + 8 * documents
    if (magic, version) != (MEGATRON_MAGIC, 1) or len(content) != size:
        raise ValueError(
            f"{path.name} is cut short, or not an index of Megatron's version 1; copy both again"
        )
    if code not in MEGATRON_TYPES:
        raise ValueError(f"{path.name} says that it holds type {code}, not token ids")
    ends = len(head) + np.array([0, 4, 12]) * sequences
    _, lengths, offsets, firsts = np.split(content, ends)
    return MEGATRON_TYPES[code], lengths.view("<i4"), offsets.view("<i8"), firsts.view("<i8")


# DataLayout: FILE.npy of little-endian int32 without a header, FILE.npy.size with their number. Bits 0 to 15 are the
# token, 16 to 29 its position in its document, 30 says whether it counts in the loss. Positions have 14 bits: in longer
# documents they begin at 0 again, or stay at the highest.


def datalayout_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    """Yields the documents window by window. Raises ValueError for tokens that are left out of the loss."""
    size_file = Path(f"{file.name}.size")
    entries = _mapped(file.name, "<i4", int(size_file.read_text()), size_file.name)
    eos = _eos_id(options)

    def starts_in(start: int, end: int) -> np.ndarray:
        body = entries[start:end]
        positions = body >> 16 & HIGHEST_POSITION
        if ((positions > 0) & (body >> 30 & 1 == 0)).any():
            raise ValueError(
                "it leaves tokens out of the loss (bit 30), which a token store can't record; set that bit, or leave "
                "these tokens out"
            )
        first = max(0, start - 1)
        return document_starts(entries[first : end + 1], eos) + first  # a neighbour at each end

    yield from cut(file, entries.view("<u2")[::2], starts_in)


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
