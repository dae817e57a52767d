"""Reads files of token ids: flat ones, NumPy's and Composer's DataLayout. They are read window by window."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
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

WINDOW = 1 << 20  # tokens of a file that are read at a time
HIGHEST_POSITION = (1 << 14) - 1  # the highest position that DataLayout can record


@dataclass(frozen=True)
class StoredArray:
    """An array of `length` numbers in an open file, from byte `offset` on. It is not mapped into memory, because a mapped page
    that can't be read ends the process by SIGBUS."""

    stream: BufferedReader
    dtype: np.dtype
    length: int
    offset: int = 0

    def read(self, start: int, end: int) -> np.ndarray:
        """Returns the numbers [start, end), up to the array's end. Raises ValueError if the file has become shorter."""
        size = self.dtype.itemsize
        byte_count = size * (min(end, self.length) - start)
        self.stream.seek(self.offset + size * start)
        content = self.stream.read(byte_count)
        if len(content) < byte_count:
            raise ValueError("it became shorter while it was read")
        return np.frombuffer(content, self.dtype)


def cut(
    file: InputFile,
    entries: StoredArray,
    bounds_in: Callable[[int, int], np.ndarray],
    token_bits: int = -1,
) -> Iterator[Document]:
    """Yields the documents of `entries`, each of which contains the id of a token in the bits `token_bits`.

    bounds_in(start, end) returns where, in [start, end], a document ends and the next one begins; it may return other
    bounds too.
    """
    count = entries.length
    for start in range(0, count, WINDOW):
        file.share_read = start / count
        end = min(start + WINDOW, count)
        bounds = {0, count, *bounds_in(start, end).tolist()}
        inner = sorted(bound for bound in bounds if start < bound < end)
        edges = [start, *inner, end]
        window = entries.read(start, end).astype(np.int64) & token_bits
        for begin, stop in zip(edges, edges[1:]):
            yield Document(window[begin - start : stop - start], begin in bounds, stop in bounds)


def _eos_id(options: DatasetConfig) -> int:
    """Returns the id of the token that ends documents, -1 if it is not known."""
    return int(options.eos_token) if options.eos_token.isdecimal() else -1


# Flat files contain one id after the other. NumPy's begin with a header that names their type. The files of nanoGPT, OLMo
# and Megatron have no header.


def flat_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    """Yields the documents between one eos and the next."""
    eos = _eos_id(options)
    with open_with_retries(file.name) as stream:
        ids = _flat_ids(file, stream, options.dtype)

        def ends_in(start: int, end: int) -> np.ndarray:
            first = max(0, start - 1)
            return np.flatnonzero(ids.read(first, end) == eos) + first + 1

        yield from cut(file, ids, ends_in)


def _flat_ids(file: InputFile, stream: BufferedReader, dtype: str) -> StoredArray:
    """Returns the ids, of the type that NumPy's header names, or else of `dtype`. Raises ValueError if the type is not known
    or does not fit."""
    head = peek_head(stream)
    check_head(file.kind, head)
    if head.startswith(NUMPY_MAGIC):
        return _numpy_array(file.name, stream)
    if dtype == "auto":
        raise ValueError("it does not name the type of its ids; give it, as in --dtype=uint16")
    size = stream.seek(0, os.SEEK_END)
    length, rest = divmod(size, np.dtype(dtype).itemsize)
    if rest:
        raise ValueError(
            f"{size} bytes are not a whole number of {dtype}: it is cut short, or its ids have another type"
        )
    ids = StoredArray(stream, np.dtype(dtype), length)
    start = ids.read(0, WINDOW)
    if start.any() and len(start) > 1 and not start[1::2].any():
        raise ValueError(f"every second id is 0: its ids are wider than {dtype}")
    return ids


def _numpy_array(name: str, stream: BufferedReader) -> StoredArray:
    """Returns the array in a file of NumPy's. Raises ValueError if it is not one of integers in one dimension."""
    try:
        array = retry_io(partial(np.load, name, mmap_mode="r"), name)  # only for its header
    except ValueError as error:
        raise ValueError(f"it is cut short, or not a plain array ({first_line(error)})") from error
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(
            f"it is an array of {array.dtype} of the shape {array.shape}, not integers in one dimension"
        )
    return StoredArray(stream, array.dtype, len(array), array.offset)


# DataLayout: FILE.npy of little-endian int32 without a header, FILE.npy.size with their number. Bits 0 to 15 are the
# token, bits 16 to 29 its position in its document, and bit 30 is set if it counts in the loss. Positions have 14 bits: in
# longer documents they restart at 0, or stay at the highest.


def datalayout_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    """Yields the documents window by window. Raises ValueError for tokens that are left out of the loss."""
    eos = _eos_id(options)
    with open_with_retries(file.name) as stream:
        entries = _layout_entries(Path(file.name), stream)

        def starts_in(start: int, end: int) -> np.ndarray:
            first = max(0, start - 1)
            body = entries.read(first, end + 1)  # with a neighbour at each end
            positions = body >> 16 & HIGHEST_POSITION
            if ((positions > 0) & (body >> 30 & 1 == 0)).any():
                raise ValueError(
                    "it leaves tokens out of the loss (bit 30), but a token store can't record that; set that bit, or "
                    "leave these tokens out"
                )
            return document_starts(body, eos) + first

        yield from cut(file, entries, starts_in, token_bits=0xFFFF)


def _layout_entries(path: Path, stream: BufferedReader) -> StoredArray:
    """Returns the entries of a file. Raises ValueError if their number is not the one in its size file."""
    size_file = Path(f"{path}.size")
    count = int(read_text(size_file))
    size = stream.seek(0, os.SEEK_END)
    if size != 4 * count or not count:
        raise ValueError(
            f"{size} bytes, but {size_file.name} says {format_count(count, 'token')} of 4 bytes; copy both files again"
        )
    return StoredArray(stream, np.dtype("<i4"), count)


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
