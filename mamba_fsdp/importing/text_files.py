"""Reads files of text: opens them, compressed or not, in their encoding, and locates the first byte that is not text."""

import codecs
import io
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from mamba_fsdp.importing.compression import BUFFER, peeked, unpacked
from mamba_fsdp.importing.inputs import Document, InputFile
from mamba_fsdp.importing.kinds import CLEAN, KINDS, contradicts, kind_of_bytes
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.retry import open_with_retries, size_of

BLOCK = 1 << 20  # bytes or characters that are read at once
# Characters of a document. It is encoded whole, and that takes some 130 bytes of memory a character.
LONGEST_TEXT = 1 << 25
LONGEST_LINE = 1 << 29  # characters of a record, or of a JSON file that is read whole
AROUND = 1 << 15  # bytes before and after a fault that show whether a file is text at all
EXCERPT = 12  # bytes before and after a fault to show
SEPARATORS = {"lines": r"\r?\n", "blank_line": r"(?:^|\n)(?:[ \t\r]*\n)+"}  # how documents end
MARKS = {  # UTF-32 comes first, since its mark begins like the mark of UTF-16
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Text of Western Europe in UTF-16, little endian, without a byte order mark.
WIDE_TEXT = re.compile(rb"(?:[\t\n\r -~\xa0-\xff]\0){8}")
# Bytes that do not occur in text: neither white space, nor what moves a terminal's cursor.
CONTROLS = re.compile(rb"[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f]")
INVALID = re.compile("[\0\udc80-\udcff]")  # NUL, and how surrogateescape decodes invalid bytes
NOT_ASCII = re.compile("[^\0-\x7f]")


class NulByte(ValueError):
    """The error if a file of text contains a NUL byte."""


class Codec:
    """The way to decode a file.

    A byte order mark names the encoding. Otherwise it is UTF-8, or the user's encoding for files with more invalid
    bytes than valid multi-byte characters. In other files the user's encoding decodes the invalid bytes alone.
    """

    def __init__(self, name: str, head: bytes, encoding: str) -> None:
        marks = [mark for mark in MARKS if head.startswith(mark)]
        self.has_mark = bool(marks)
        self.encoding = MARKS[marks[0]] if marks else "utf-8"
        self.errors = "strict"
        if encoding and not marks:
            self._choose(name, encoding)
        self.allows_nul = codecs.lookup(self.encoding).name.startswith(("utf-16", "utf-32"))

    def _choose(self, name: str, encoding: str) -> None:
        invalid = 0
        others = 0
        with open_with_retries(name) as file:
            stream = io.TextIOWrapper(unpacked(file), "utf-8", "surrogateescape")
            while text := stream.read(BLOCK):
                invalid += len(INVALID.findall(text))
                others += len(NOT_ASCII.findall(text))
        if invalid * 2 > others:
            self.encoding = encoding
            return
        self.errors = f"mamba_fsdp.{encoding}"
        codecs.register_error(self.errors, partial(_decode_invalid, encoding))


def _decode_invalid(encoding: str, error: UnicodeError) -> tuple[str, int]:
    """Decodes the invalid bytes of UTF-8 text in another encoding."""
    assert isinstance(error, UnicodeDecodeError)
    try:
        return error.object[error.start : error.end].decode(encoding), error.end
    except UnicodeDecodeError:
        raise error from None


class _Watched(io.RawIOBase):
    """A stream of a file's bytes, decompressed, that notes the share of the file that is read and raises NulByte."""

    def __init__(self, file: InputFile, encoding: str) -> None:
        self.file = file
        self.stored = open_with_retries(file.name)
        self.size = max(1, size_of(Path(file.name)))
        self.stream = unpacked(self.stored)
        head = peeked(self.stream)
        check_head(file.kind, head)
        self.codec = Codec(file.name, head, encoding)
        file.has_mark = self.codec.has_mark

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.stream.readinto(buffer)
        if not self.codec.allows_nul and b"\0" in bytes(buffer[:count]):
            raise NulByte
        self.file.share_read = self.stored.tell() / self.size
        return count

    def close(self) -> None:
        self.stored.close()
        super().close()


def opened(file: InputFile, encoding: str, newline: str = "\n") -> IO[str]:
    """Opens a file for reading as text, decompressed. encoding: of files that are not UTF-8, or empty.

    Raises ValueError if it contains something else; reading raises NulByte or UnicodeDecodeError.
    """
    watched = _Watched(file, encoding)
    codec = watched.codec
    stream = io.BufferedReader(watched, BUFFER)
    return io.TextIOWrapper(stream, codec.encoding, codec.errors, newline)


def check_head(kind: str, head: bytes) -> None:
    """Raises ValueError if a file of this kind begins like something else."""
    content = kind_of_bytes(head)
    if content and contradicts(content, kind):
        raise ValueError(f"it is {content.title}; {content.remedy}")


def text_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    with opened(file, options.encoding) as stream:
        if options.documents == "file":
            yield Document(stream.read(LONGEST_TEXT + 1))
            return
        kind, _, text = options.documents.partition(":")
        separator = re.compile(SEPARATORS.get(kind) or re.escape(text))
        rest = ""
        # Reads at least as much as the rest, so that a long document is searched twice at most, not once for each block.
        while text := stream.read(max(BLOCK, len(rest))):
            *documents, rest = separator.split(rest + text)
            yield from [Document(document.strip("\r\n")) for document in documents]
            if len(rest) > LONGEST_TEXT:
                raise ValueError(too_long())
        yield Document(rest.strip("\r\n"))


def too_long() -> str:
    """Returns the message for a document that is too long to be encoded."""
    return f"a document has more than {LONGEST_TEXT:,} characters; {CLEAN}"


def lines_of(stream: IO[str]) -> Iterator[str]:
    """Yields the lines of a stream. Raises ValueError for a line that is too long to be read into memory."""
    number = 0
    while line := stream.readline(LONGEST_LINE):
        number += 1
        if len(line) == LONGEST_LINE:
            raise ValueError(f"line {number:,} has {LONGEST_LINE:,} characters or more; {CLEAN}")
        yield line


def fault_in(name: str, encoding: str, deadline: float = float("inf")) -> str:
    """Returns where a file of text can't be decoded, and what to do; "" if it can, or if that is not known at
    `deadline`."""
    position = 0  # bytes before `text`
    line = 1
    undecoded = b""  # the first bytes of a character that the block has cut
    with open_with_retries(name) as file:
        stream = unpacked(file)
        codec = Codec(name, peeked(stream), encoding)
        decoder = codecs.getincrementaldecoder(codec.encoding)(codec.errors)
        while time.monotonic() < deadline:
            block = stream.read(BLOCK)
            text = undecoded + block
            fault = -1 if codec.allows_nul else text.find(b"\0")
            try:
                decoder.decode(block[: fault - len(undecoded)] if fault >= 0 else block, not block)
            except UnicodeDecodeError as error:
                fault = error.start
            if fault >= 0:
                text += stream.read(AROUND)
                line += text[:fault].count(b"\n")
                described = _described(text, fault, codec)
                return f"byte {position + fault + 1:,}, on line {line:,}, {described}"
            if not block:
                break
            line += block.count(b"\n")
            undecoded = decoder.getstate()[0]
            position += len(text) - len(undecoded)
    return ""


def _described(text: bytes, fault: int, codec: Codec) -> str:
    """Describes the fault at a byte of a file, with what to do."""
    around = text[max(0, fault - AROUND) : fault + AROUND]
    if WIDE_TEXT.match(around):
        return "is NUL: it looks like text in UTF-16; --encoding=utf-16-le reads it"
    if not text[fault:].strip(b"\0"):
        return "is NUL, and so are all after it: they were lost in a crash; copy the file again, or leave it out"
    nul = around.count(0)
    controls = len(CONTROLS.findall(around)) - nul
    if controls * 100 > len(around) or nul * 2 > len(around):
        return f"shows {KINDS['binary'].title}, not text; {KINDS['binary'].use}"
    if text[fault] == 0:
        return f"is NUL, which is not text; {CLEAN}"
    excerpt = text[max(0, fault - EXCERPT) : fault + EXCERPT].decode("cp1252", "replace")
    wrong = f"is 0x{text[fault]:02x}, which is not {codec.encoding}"
    return f"{wrong}; --encoding=cp1252 would read {excerpt!r} there"
