"""Decompresses files. This module imports neither torch nor numpy."""

import bz2
import gzip
import io
import lzma
import os
from collections.abc import Callable
from typing import Any

ENDINGS = (".gz", ".zst", ".bz2", ".xz")
BUFFER = 1 << 16
# How many bytes at the beginning identify a file. The magic of a tar archive is at byte 257.
HEAD = 512


def _open_zstandard(file: io.BufferedReader) -> Any:
    import pyarrow  # imported here because the import is slow, and few files need it

    return pyarrow.CompressedInputStream(file, "zstd")


OPENERS: dict[bytes, Callable[[io.BufferedReader], Any]] = {
    b"\x1f\x8b\x08": gzip.open,
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": _open_zstandard,
}


def strip_compression(name: str) -> str:
    """Returns the name without the extension of a compressed file, such as .gz."""
    base, ending = os.path.splitext(name)
    return base if ending.lower() in ENDINGS else name


def decompress(file: io.BufferedReader) -> io.BufferedReader:
    """Returns a stream of the content of `file`. The content is decompressed if it is compressed."""
    head = peek_head(file)
    for magic, opener in OPENERS.items():
        if head.startswith(magic):
            return io.BufferedReader(opener(file), BUFFER)
    return file


def peek_head(file: io.BufferedReader) -> bytes:
    """Returns the next bytes of a stream, up to HEAD, without advancing its position."""
    return file.peek(HEAD)[:HEAD]
