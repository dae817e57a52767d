"""Decompresses files. Needs neither torch nor numpy."""

import bz2
import gzip
import io
import lzma
import os
from collections.abc import Callable
from typing import Any

ENDINGS = (".gz", ".zst", ".bz2", ".xz")
BUFFER = 1 << 16
HEAD = 512  # bytes that identify a file; a tar archive has its mark at byte 257


def _open_zstandard(file: io.BufferedReader) -> Any:
    import pyarrow  # imported late: it takes long, and few files need it

    return pyarrow.CompressedInputStream(file, "zstd")


OPENERS: dict[bytes, Callable[[io.BufferedReader], Any]] = {
    b"\x1f\x8b\x08": gzip.open,
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": _open_zstandard,
}


def without_ending(name: str) -> str:
    """Returns the name without the ending of a compressed file."""
    base, ending = os.path.splitext(name)
    return base if ending.lower() in ENDINGS else name


def unpacked(file: io.BufferedReader) -> io.BufferedReader:
    """Returns a stream of the file's content, decompressed if it is compressed."""
    head = peeked(file)
    for magic, opener in OPENERS.items():
        if head.startswith(magic):
            return io.BufferedReader(opener(file), BUFFER)
    return file


def peeked(file: io.BufferedReader) -> bytes:
    """Returns the first bytes of a stream without moving in it."""
    return file.peek(HEAD)[:HEAD]
