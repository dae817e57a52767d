"""Reads files of token ids: flat ones, NumPy's, Megatron's and Composer's DataLayout. They are mapped and read window by
window."""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mamba_fsdp.errors import first_line
from mamba_fsdp.importing.compression import HEAD
from mamba_fsdp.importing.inputs import Document, InputFile
from mamba_fsdp.importing.kinds import INDEX, contradicts, kind_of_bytes
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.text import format_count

WINDOW = 1 << 20  # tokens of a mapped file read at a time
HIGHEST_POSITION = (1 << 14) - 1  # in DataLayout
MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type of the ids, sequences, documents
MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


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


def _mapped(path: str | Path, dtype: Any, count: int, source: str) -> np.ndarray:
    """Maps the `count` ids in a file. Raises ValueError if the file has another size than the file `source` records."""
    dtype = np.dtype(dtype)
    size = Path(path).stat().st_size
    if size != count * dtype.itemsize or not count:
        raise ValueError(
            f"{size} bytes, but {source} says {format_count(count, 'token')} of {format_count(dtype.itemsize, 'byte')}; copy "
            "again what is cut short, or belongs to another file"
        )
    return np.memmap(path, dtype, "r")


def _eos_id(options: DatasetConfig) -> int:
    """Returns the id of the token that ends documents, -1 if it is not known."""
    return int(options.eos_token) if options.eos_token.isdecimal() else -1


# Flat files: ids one after the other. NumPy's begin with a header that names their type; nanoGPT's and OLMo's have none.


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
    """Maps the ids, of the type that NumPy's header names, or else `dtype`. Raises ValueError if the type is not known, or
    does not fit."""
    with open(name, "rb") as stream:
        found = kind_of_bytes(stream.read(HEAD))
    if found and contradicts(found, "ids"):
        raise ValueError(f"it is {found.title}; {found.use}")
    if found is None or found.name != "numpy":
        return _ids_without_header(name, dtype)
    ids = _numpy_array(name)
    _check_dtype(ids, dtype, "header")
    return ids


def _check_dtype(ids: np.ndarray, dtype: str, source: str) -> None:
    if dtype not in ("auto", ids.dtype.name):
        raise ValueError(f"its {source} says {ids.dtype.name}: leave out --dtype={dtype}")


def _ids_without_header(name: str, dtype: str) -> np.ndarray:
    if dtype == "auto":
        raise ValueError(
            "it does not name the type of its ids; give it, as in --dtype=uint16 (Megatron's come with a file .idx, "
            "DataLayout's with .npy.size)"
        )
    if Path(name).with_name(INDEX).exists():
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
