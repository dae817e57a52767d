"""Reads files of token ids: flat ones, NumPy's and Composer's DataLayout. They are mapped and read window by window."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mamba_fsdp.errors import first_line
from mamba_fsdp.importing.compression import peek_head
from mamba_fsdp.importing.inputs import Document, InputFile
from mamba_fsdp.importing.kinds import NUMPY_MAGIC
from mamba_fsdp.importing.text_files import check_head
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.retry import open_with_retries, read_text, retry_io
from mamba_fsdp.text import format_count

WINDOW = 1 << 20  # tokens of a mapped file that are read at a time
HIGHEST_POSITION = (1 << 14) - 1  # the highest position that DataLayout can record


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


def _eos_id(options: DatasetConfig) -> int:
    """Returns the id of the token that ends documents, -1 if it is not known."""
    return int(options.eos_token) if options.eos_token.isdecimal() else -1


# Flat files contain one id after the other. NumPy's begin with a header that names their type. The files of nanoGPT, OLMo
# and Megatron have no header.


def flat_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    """Yields the documents between one eos and the next."""
    ids = _flat_ids(file, options.dtype)
    eos = _eos_id(options)

    def ends_in(start: int, end: int) -> np.ndarray:
        first = max(0, start - 1)
        return np.flatnonzero(ids[first:end] == eos) + first + 1

    yield from cut(file, ids, ends_in)


def _flat_ids(file: InputFile, dtype: str) -> np.ndarray:
    """Maps the ids, of the type that NumPy's header names, or else of `dtype`. Raises ValueError if the type is not known
    or does not fit."""
    with open_with_retries(file.name) as stream:
        head = peek_head(stream)
        check_head(file.kind, head)
        if head.startswith(NUMPY_MAGIC):
            return _numpy_array(file.name)
        if dtype == "auto":
            raise ValueError("it does not name the type of its ids; give it, as in --dtype=uint16")
        size = stream.seek(0, os.SEEK_END)
        if size % np.dtype(dtype).itemsize:
            raise ValueError(
                f"{size} bytes are not a whole number of {dtype}: it is cut short, or its ids have another type"
            )
        ids = np.memmap(stream, dtype, "r")
    start = ids[:WINDOW]
    if start.any() and len(start) > 1 and not start[1::2].any():
        raise ValueError(f"every second id is 0: its ids are wider than {dtype}")
    return ids


def _numpy_array(name: str) -> np.ndarray:
    """Maps the array in a file of NumPy's."""
    try:
        array = retry_io(partial(np.load, name, mmap_mode="r"), name)
    except ValueError as error:
        raise ValueError(f"it is cut short, or not a plain array ({first_line(error)})") from error
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(
            f"it is an array of {array.dtype} of the shape {array.shape}, not integers in one dimension"
        )
    return array


# DataLayout: FILE.npy of little-endian int32 without a header, FILE.npy.size with their number. Bits 0 to 15 are the
# token, bits 16 to 29 its position in its document, and bit 30 is set if it counts in the loss. Positions have 14 bits: in
# longer documents they restart at 0, or stay at the highest.


def datalayout_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    """Yields the documents window by window. Raises ValueError for tokens that are left out of the loss."""
    entries = _mapped_entries(Path(file.name))
    eos = _eos_id(options)

    def starts_in(start: int, end: int) -> np.ndarray:
        body = entries[start:end]
        positions = body >> 16 & HIGHEST_POSITION
        if ((positions > 0) & (body >> 30 & 1 == 0)).any():
            raise ValueError(
                "it leaves tokens out of the loss (bit 30), but a token store can't record that; set that bit, or leave "
                "these tokens out"
            )
        first = max(0, start - 1)
        return document_starts(entries[first : end + 1], eos) + first  # a neighbour at each end

    yield from cut(file, entries.view("<u2")[::2], starts_in)


def _mapped_entries(path: Path) -> np.ndarray:
    """Maps the entries of a file. Raises ValueError if their number is not the one in its size file."""
    size_file = Path(f"{path}.size")
    count = int(read_text(size_file))
    with open_with_retries(path) as stream:
        size = stream.seek(0, os.SEEK_END)
        if size != 4 * count or not count:
            raise ValueError(
                f"{size} bytes, but {size_file.name} says {format_count(count, 'token')} of 4 bytes; copy both files again"
            )
        return np.memmap(stream, "<i4", "r")


def document_starts(entries: Any, eos: int) -> np.ndarray:
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
