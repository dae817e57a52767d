"""Tells what a file is by its first bytes, whatever its name says, and what to do with one that holds no text."""

import io
import lzma
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUFFER = 1 << 16
HEAD = 512  # bytes that are looked at; a tar archive says what it is at 257
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")  # endings of names
NUMPY = "numpy"
LLM_C = "llm.c"
OF_IDS = (NUMPY, LLM_C, "binary")  # what a file of token ids may look like
POINTERS = ("lfs", "annex")  # names of signatures of what stands for a file
UNPACKED = ("gzip", "zstd", "bz2", "xz")  # names of signatures; what they hold is read


@dataclass(frozen=True)
class Signature:
    """What a file is, and what to do with it."""

    name: str
    title: str  # with its article
    pattern: str  # a regular expression of Latin-1 characters, which the first bytes match
    remedy: str = "write its text as .txt, .jsonl or .parquet"  # with {file} and {folder}

    def advice(self, path: str | Path) -> str:
        """Returns what to do with the file at `path`: words and a command."""
        folder = str(path).removesuffix("".join(Path(path).suffixes)) or "unpacked"
        if folder == str(path):
            folder += ".unpacked"
        file = shlex.quote(str(path))
        return self.remedy.format(file=file, folder=shlex.quote(folder))


SIGNATURES = [
    Signature(
        "tar",
        "a tar archive",
        ".{257}ustar",
        "unpack it: mkdir {folder} && tar xf {file} -C {folder}",
    ),
    Signature(
        "zip",
        "a zip archive, as .docx, .epub and .npz files are too",
        r"PK(?:\x03\x04|\x05\x06)",
        "unpack it: unzip {file} -d {folder}",
    ),
    Signature("7z", "a 7z archive", r"7z\xbc\xaf\x27\x1c", "unpack it: 7z x {file} -o{folder}"),
    Signature("rar", "a RAR archive", r"Rar!\x1a\x07", "unpack it: unrar x {file}"),
    Signature("gzip", "gzip data", r"\x1f\x8b\x08", "unpack it: gzip -dc {file} > {folder}"),
    Signature(
        "bz2", "bzip2 data", r"BZh[1-9](?:1AY&SY|\x17rE8P\x90)", "unpack it: bzip2 -dk {file}"
    ),
    Signature("xz", "xz data", r"\xfd7zXZ\0", "unpack it: xz -dc {file} > {folder}"),
    Signature(
        "zstd", "Zstandard data", r"\x28\xb5\x2f\xfd", "unpack it: zstd -dc {file} > {folder}"
    ),
    Signature("lz4", "LZ4 data", r"\x04\x22\x4d\x18", "unpack it: lz4 -dc {file} > {folder}"),
    Signature("parquet", "a Parquet file", r"PAR1[\0-\x1f]", "--format=parquet reads it"),
    Signature("arrow", "an Arrow file", r"ARROW1\0\0", "--format=arrow reads it"),
    Signature(NUMPY, "a NumPy array", r"\x93NUMPY", "if it holds token ids, --format=ids reads it"),
    Signature(
        LLM_C,
        "a file of llm.c's token ids",
        r"(?:\x88\xd8\x34\x01\x01|\xa1\xd9\x34\x01\x07)\0\0\0",
        "--format=ids reads it",
    ),
    Signature("megatron", "an index of Megatron's", r"MMIDIDX\0\0", "name the .bin next to it"),
    Signature("sqlite", "an SQLite database", r"SQLite format 3\0"),
    Signature("pdf", "a PDF document", r"%PDF-\d", "take its text out: pdftotext {file}"),
    Signature("office", "a document of an old Office format", r"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"),
    Signature("rtf", "a document in RTF", r"\{\\rtf\d"),
    Signature("elf", "a program or a library (ELF)", r"\x7fELF", "leave it out"),
    Signature("pickle", "a pickle", r"\x80(?:[\x02\x03][\]}(cX\x8a]|[\x04\x05]\x95)"),
    Signature("hdf5", "an HDF5 file", r"\x89HDF\r\n\x1a\n"),
    Signature("gguf", "a model in GGUF", "GGUF", "leave it out"),
    Signature("image", "an image", r"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a", "leave it out"),
    Signature(
        "lfs",
        "a Git LFS pointer, not the file itself",
        r"version https://git-lfs\.github\.com/spec/v\d",
        "get the file: git lfs pull, in the folder that was cloned",
    ),
    Signature(
        "annex",
        "a git-annex pointer, not the file itself",
        "/annex/objects/",
        "get the file: git annex get {file}",
    ),
]
# A group for each, and none within one.
ANY_SIGNATURE = re.compile("|".join(f"({each.pattern})" for each in SIGNATURES), re.DOTALL)
PAGE = Signature(
    "page",
    "a page of HTML or XML, such as a sign-in or an error in place of a download",
    r"(?:\xef\xbb\xbf)?\s*(?i:<(?:!doctype|html|head|body|\?xml))",
    "download the file again",
)
BINARY = Signature(
    "binary",
    "binary data",
    "",
    "if it holds token ids, say of which type, as in --format=ids --dtype=uint16: see docs/data.md",
)
BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")  # of UTF-16 and UTF-32


def signature_of(head: bytes, text_may_be_a_page: bool = True) -> Signature | None:
    """Returns what a file is by its first bytes; None if they don't tell, as in a file of text."""
    beginning = head.decode("latin-1")
    match = ANY_SIGNATURE.match(beginning)
    if match and match.lastindex:
        return SIGNATURES[match.lastindex - 1]
    if not text_may_be_a_page and re.match(PAGE.pattern, beginning):
        return PAGE
    return None


def content_of(path: str | Path) -> Signature | None:
    """Returns what the file at `path` is, or what is compressed in it; None for text, and for anything but a file.

    Raises OSError, or what a library raises for damaged compressed data.
    """
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        head = peeked(unpacked(file))
    found = signature_of(head)
    if found is None and b"\0" in head and not head.startswith(BYTE_ORDER_MARKS):
        return BINARY
    return found


def compression_of(path: str | Path) -> str:
    """Returns how the file at `path` is compressed, by its content: gzip, zstd, bz2, xz; "" if it is not."""
    with open(path, "rb") as file:
        found = signature_of(peeked(file))
    return found.name if found and found.name in UNPACKED else ""


def unpacked(file: io.BufferedReader) -> io.BufferedReader:
    """Returns a stream of what `file` holds, unpacked if it is compressed."""
    found = signature_of(peeked(file))
    if not found or found.name not in UNPACKED:
        return file
    stream: Any
    if found.name == "xz":
        stream = lzma.LZMAFile(file)
    else:
        import pyarrow  # late: it takes long, and few files need it

        stream = pyarrow.CompressedInputStream(file, found.name)
    return io.BufferedReader(stream, BUFFER)


def peeked(file: io.BufferedReader) -> bytes:
    """Returns the first bytes of a stream without moving in it."""
    return file.peek(HEAD)[:HEAD]
