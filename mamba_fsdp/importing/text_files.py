"""Reads text files: decompresses them, detects their encoding, and finds the first invalid byte."""

import codecs
import io
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from mamba_fsdp.importing.compression import BUFFER, decompress, peek_head
from mamba_fsdp.importing.inputs import Document, InputFile
from mamba_fsdp.importing.kinds import CLEAN, KINDS, contradicts, kind_of_bytes
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.retry import open_with_retries, size_of

BLOCK = 1 << 20  # bytes or characters to read at a time
# The maximal number of characters in a document. Documents are encoded as a whole, which takes about 130 bytes of memory
# per character.
MAX_TEXT_LENGTH = 1 << 25
MAX_LINE_LENGTH = 1 << 29  # maximum characters of a record, or of a JSON file read as a whole
AROUND = (
    1 << 15
)  # bytes before and after an invalid byte that decide whether the file is text at all
EXCERPT = 12  # bytes before and after an invalid byte to show in the message
SEPARATORS = {"lines": r"\r?\n", "blank_line": r"(?:^|\n)(?:[ \t\r]*\n)+"}
MARKS = {  # UTF-32 comes before UTF-16, because one of its marks begins with a mark of UTF-16
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Matches Western European text in little-endian UTF-16 without a byte order mark.
WIDE_TEXT = re.compile(rb"(?:[\t\n\r -~\xa0-\xff]\0){8}")
# Control bytes that do not occur in text. White space, backspace and escape can occur.
CONTROLS = re.compile(rb"[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f]")
INVALID = re.compile("[\0\udc80-\udcff]")  # NUL, and invalid bytes as surrogateescape decodes them
NOT_ASCII = re.compile("[^\0-\x7f]")


class NulByte(ValueError):
    """The error for a text file that contains a NUL byte."""


class Codec:
    """The encoding of a text file.

    It is the encoding of the byte order mark if the file begins with one, otherwise UTF-8. The user's encoding takes the
    place of UTF-8 in a file with more invalid bytes than valid multi-byte characters. In any other file, the user's
    encoding decodes only the invalid bytes.
    """

    def __init__(self, name: str, head: bytes, encoding: str) -> None:
        """name: path of the file. head: its first bytes. encoding: the user's encoding, or "" if it is not set."""
        marks = [mark for mark in MARKS if head.startswith(mark)]
        self.encoding = MARKS[marks[0]] if marks else "utf-8"
        self.errors = "strict"
        if encoding and not marks:
            self._choose(name, encoding)
        self.allows_nul = codecs.lookup(self.encoding).name.startswith(("utf-16", "utf-32"))

    def _choose(self, name: str, encoding: str) -> None:
        invalid = 0
        others = 0
        with open_with_retries(name) as file:
            stream = io.TextIOWrapper(decompress(file), "utf-8", "surrogateescape")
            while text := stream.read(BLOCK):
                invalid += len(INVALID.findall(text))
                others += len(NOT_ASCII.findall(text))
        if invalid * 2 > others:
            self.encoding = encoding
            return
        self.errors = f"mamba_fsdp.{encoding}"
        codecs.register_error(self.errors, partial(_decode_invalid, encoding))


def _decode_invalid(encoding: str, error: UnicodeError) -> tuple[str, int]:
    """Decodes the invalid bytes of UTF-8 text with another encoding. It is an error handler for codecs.register_error."""
    assert isinstance(error, UnicodeDecodeError)
    try:
        return error.object[error.start : error.end].decode(encoding), error.end
    except UnicodeDecodeError:
        raise error from None


class _ByteStream(io.RawIOBase):
    """A stream of the decompressed bytes of a file. Reading updates `share_read` of the file, and raises NulByte if the text
    contains a NUL byte."""

    def __init__(self, file: InputFile, encoding: str) -> None:
        self.file = file
        self.stored = open_with_retries(file.name)
        self.size = max(1, size_of(Path(file.name)))
        self.stream = decompress(self.stored)
        head = peek_head(self.stream)
        check_head(file.kind, head)
        self.codec = Codec(file.name, head, encoding)

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


def open_text(file: InputFile, encoding: str, newline: str = "\n") -> IO[str]:
    """Opens a text file, which can be compressed, for reading.

    encoding: the user's encoding, see Codec. newline: see io.TextIOWrapper. Raises ValueError if the file begins like a file
    of another kind. Reading raises NulByte or UnicodeDecodeError for an invalid byte.
    """
    stream = _ByteStream(file, encoding)
    codec = stream.codec
    return io.TextIOWrapper(
        io.BufferedReader(stream, BUFFER), codec.encoding, codec.errors, newline
    )


def check_head(kind: str, head: bytes) -> None:
    """Raises ValueError if a file of this kind begins with the bytes `head` of another kind."""
    content = kind_of_bytes(head)
    if content and contradicts(content, kind):
        raise ValueError(f"the file is {content.title}; {content.remedy}")


def text_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    """Yields the documents of a text file: the whole file, or the parts between the separators of options.documents.

    Raises ValueError if a part is too long."""
    with open_text(file, options.encoding) as stream:
        if options.documents == "file":
            yield Document(stream.read(MAX_TEXT_LENGTH + 1))
            return
        kind, _, text = options.documents.partition(":")
        separator = re.compile(SEPARATORS.get(kind) or re.escape(text))
        rest = ""
        # Read at least as much as `rest`. Otherwise a long document would be searched again with each block.
        while text := stream.read(max(BLOCK, len(rest))):
            *documents, rest = separator.split(rest + text)
            yield from [Document(document.strip("\r\n")) for document in documents]
            if len(rest) > MAX_TEXT_LENGTH:
                raise ValueError(too_long_message())
        yield Document(rest.strip("\r\n"))


def too_long_message() -> str:
    """Returns the message for a document that is too long to be encoded."""
    return f"a document has more than {MAX_TEXT_LENGTH:,} characters; {CLEAN}"


def read_lines(stream: IO[str]) -> Iterator[str]:
    """Yields the lines of a stream. Raises ValueError for a line that is too long to be read into memory."""
    number = 0
    while line := stream.readline(MAX_LINE_LENGTH):
        number += 1
        if len(line) == MAX_LINE_LENGTH:
            raise ValueError(f"line {number:,} has {MAX_LINE_LENGTH:,} characters or more; {CLEAN}")
        yield line


def find_invalid_byte(name: str, encoding: str, deadline: float = float("inf")) -> str:
    """Finds the first invalid byte of a text file. Returns its position with advice; "" if there is none, or if none was found
    before `deadline`.

    encoding: the user's encoding, see Codec. deadline: a time of time.monotonic()."""
    position = 0  # the number of bytes before `text`
    line = 1
    undecoded = b""  # the first bytes of a character that was split between two blocks
    with open_with_retries(name) as file:
        stream = decompress(file)
        codec = Codec(name, peek_head(stream), encoding)
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
                described = _describe_invalid_byte(text, fault, codec)
                return f"byte {position + fault + 1:,}, on line {line:,}, {described}"
            if not block:
                break
            line += block.count(b"\n")
            undecoded = decoder.getstate()[0]
            position += len(text) - len(undecoded)
    return ""


def _describe_invalid_byte(text: bytes, fault: int, codec: Codec) -> str:
    """Describes the invalid byte with index `fault` in `text`, and gives advice."""
    around = text[max(0, fault - AROUND) : fault + AROUND]
    if WIDE_TEXT.match(around):
        return "is NUL, as in text in UTF-16; --encoding=utf-16-le reads it"
    if not text[fault:].strip(b"\0"):
        return "is NUL, and so are all bytes after it: they were lost in a crash; copy the file again, or leave it out"
    nul = around.count(0)
    controls = len(CONTROLS.findall(around)) - nul
    if controls * 100 > len(around) or nul * 2 > len(around):
        return f"is part of {KINDS['binary'].title}, not text; {KINDS['binary'].use}"
    if text[fault] == 0:
        return f"is NUL, but text does not contain NUL; {CLEAN}"
    excerpt = text[max(0, fault - EXCERPT) : fault + EXCERPT].decode("cp1252", "replace")
    wrong = f"is 0x{text[fault]:02x}, which is not valid {codec.encoding}"
    return f"{wrong}; --encoding=cp1252 would read {excerpt!r} there"
