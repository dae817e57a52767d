"""Reads files of token ids window by window: flat files, files of NumPy, and Composer's DataLayout."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

WINDOW = 1 << 20  # the number of tokens to read at a time
MAX_POSITION = (1 << 14) - 1  # the largest position that DataLayout can store


@dataclass(frozen=True)
class StoredArray:
    """An array of `length` numbers in an open file, from byte `offset` on. It is not mapped into memory, because a read error
    in a mapped file kills the process with SIGBUS."""

    stream: BufferedReader
    dtype: np.dtype
    length: int
    offset: int = 0

    def read(self, start: int, end: int) -> np.ndarray:
        """Returns the numbers [start, end), but at most up to the end of the array. Raises ValueError if the file has become
        shorter."""
        size = self.dtype.itemsize
        byte_count = size * (min(end, self.length) - start)
        self.stream.seek(self.offset + size * start)
        content = self.stream.read(byte_count)
        if len(content) < byte_count:
            raise ValueError(
                "the file became shorter while it was read; start again when it is complete"
            )
        return np.frombuffer(content, self.dtype)


def split_documents(
    file: InputFile,
    entries: StoredArray,
    bounds_in: Callable[[int, int], np.ndarray],
    token_bits: int = -1,
) -> Iterator[Document]:
    """Yields the documents in `entries`, and updates `share_read` of `file`.

    bounds_in(start, end): returns the positions in [start, end] at which a document ends and the next one begins. It can also
    return bounds outside of this range. token_bits: a mask of the bits of an entry that contain the token id.
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
    """Returns the id of the token that ends documents; -1 if it is not known."""
    return int(options.eos_token) if options.eos_token.isdecimal() else -1


# Flat files contain one id after the other. Files of NumPy begin with a header that contains the dtype. The files of nanoGPT,
# OLMo and Megatron do not have a header.


def flat_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    """Yields the documents of a flat file or a file of NumPy. Each eos ends a document."""
    eos = _eos_id(options)
    with open_with_retries(file.name) as stream:
        ids = _flat_ids(file, stream, options.dtype)

        def ends_in(start: int, end: int) -> np.ndarray:
            first = max(0, start - 1)
            return np.flatnonzero(ids.read(first, end) == eos) + first + 1

        yield from split_documents(file, ids, ends_in)


def _flat_ids(file: InputFile, stream: BufferedReader, dtype: str) -> StoredArray:
    """Returns the ids in a file. Their dtype is the one in NumPy's header, otherwise `dtype`. Raises ValueError if the dtype is
    not known or does not fit."""
    head = peek_head(stream)
    check_head(file.kind, head)
    if head.startswith(NUMPY_MAGIC):
        return _numpy_array(file.name, stream)
    if dtype == "auto":
        raise ValueError(
            "the file does not name the type of its token ids; give the type, as in --dtype=uint16"
        )
    size = stream.seek(0, os.SEEK_END)
    length, rest = divmod(size, np.dtype(dtype).itemsize)
    if rest:
        raise ValueError(
            f"the file has {size} bytes, not a multiple of {np.dtype(dtype).itemsize} as --dtype={dtype} requires; copy "
            "the file again, or correct --dtype"
        )
    ids = StoredArray(stream, np.dtype(dtype), length)
    start = ids.read(0, WINDOW)
    if start.any() and len(start) > 1 and not start[1::2].any():
        raise ValueError(
            f"every second token id is 0, so the ids are wider than {dtype}; give a wider --dtype"
        )
    return ids


def _numpy_array(name: str, stream: BufferedReader) -> StoredArray:
    """Returns the array in a file of NumPy. Raises ValueError if it is not a one-dimensional array of integers."""
    try:
        array = retry_io(np.load, name, name, "r")  # only the header of the file is used
    except ValueError as error:
        raise ValueError(
            f"the file is truncated or not a plain array ({first_line(error)}); copy it again"
        ) from error
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(
            f"the file contains an array of {array.dtype} of shape {array.shape}; save a one-dimensional array of integers"
        )
    return StoredArray(stream, array.dtype, len(array), array.offset)


# DataLayout consists of FILE.npy, little-endian int32 entries without a header, and FILE.npy.size with the number of entries.
# Bits 0 to 15 of an entry are the token, bits 16 to 29 its position in its document, and bit 30 is set if the token counts in
# the loss. Positions have 14 bits. In longer documents they restart at 0, or keep the largest value.


def datalayout_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    """Yields the documents of a DataLayout file. Raises ValueError for tokens that are excluded from the loss."""
    eos = _eos_id(options)
    with open_with_retries(file.name) as stream:
        entries = _layout_entries(Path(file.name), stream)

        def starts_in(start: int, end: int) -> np.ndarray:
            first = max(0, start - 1)
            body = entries.read(first, end + 1)  # one more entry on each side
            positions = body >> 16 & MAX_POSITION
            if ((positions > 0) & (body >> 30 & 1 == 0)).any():
                raise ValueError(
                    "the file excludes tokens from the loss (bit 30), but a token store can't record that; set bit 30, or "
                    "remove these tokens"
                )
            return document_starts(body, eos) + first

        yield from split_documents(file, entries, starts_in, token_bits=0xFFFF)


def _layout_entries(path: Path, stream: BufferedReader) -> StoredArray:
    """Returns the entries of a DataLayout file. Raises ValueError if their number differs from the one in its size file."""
    size_file = Path(f"{path}.size")
    count = int(read_text(size_file))
    size = stream.seek(0, os.SEEK_END)
    if size != 4 * count or not count:
        raise ValueError(
            f"the file has {size} bytes, but {size_file.name} specifies {format_count(count, 'token')} of 4 bytes; copy both "
            "files again"
        )
    return StoredArray(stream, np.dtype("<i4"), count)


def document_starts(entries: Any, eos: int) -> np.ndarray:
    """Returns the indices at which documents start in `entries` (n,), except for index 0.

    A document starts at each position that is not one more than the previous position. There are two exceptions in a document
    that is longer than MAX_POSITION: its next positions can keep this value, or restart at 0. A restart at 0 is a new document
    only if the previous token is `eos`, or if the previous positions kept the value MAX_POSITION.
    """
    positions = entries >> 16 & MAX_POSITION
    before = positions[:-1]
    after = positions[1:]
    has_ended = (entries[:-1] & 0xFFFF) == eos
    has_stayed = np.append(False, before[:-1] == MAX_POSITION)[: len(before)]
    wraps = (before == MAX_POSITION) & (after == 0) & ~has_ended & ~has_stayed
    stays = (before == MAX_POSITION) & (after == MAX_POSITION)
    return np.flatnonzero((after != before + 1) & ~wraps & ~stays) + 1
