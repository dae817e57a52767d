"""Opens files of text, compressed or not, and says where and why one is not UTF-8."""

import codecs
import io
import os
import re
import shlex
import time
import unicodedata
from pathlib import Path
from typing import IO, Any

from mamba_fsdp.data.corpus import InputFile
from mamba_fsdp.storage.signatures import (
    BINARY,
    BUFFER,
    COMPRESSED,
    compression_of,
    peeked,
    signature_of,
    unpacked,
)

BLOCK = 1 << 20  # bytes read at once
AROUND = 1 << 15  # bytes before and after a fault that are looked at
# Of bytes that no text holds: neither white space, nor what moves a terminal's cursor.
CONTROLS = re.compile(rb"[\x01-\x07\x0e-\x1a\x1c-\x1f\x7f]")
OTHER_BYTES = re.compile(rb"[\x80-\xff]+")
BYTE_BY_A_LETTER = re.compile(
    rb"(?<=[A-Za-z])[\x80-\xff](?![\x80-\xff])|(?<![\x80-\xff])[\x80-\xff](?=[A-Za-z])"
)
UNDEFINED = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")  # in CP1252
UNKNOWN = "ENCODING"
MARKS = {  # the longer ones first: that of UTF-32 begins as that of UTF-16
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
DROP_NUL = "tr -d '\\000'"
DROP_INVALID = "iconv -c -f UTF-8 -t UTF-8"
UNPACKING = {"gzip": "gzip -dc", "zstd": "zstd -dc", "bz2": "bzip2 -dc", "xz": "xz -dc"}


class NulByte(ValueError):
    """The error if a file of text holds a NUL byte."""


class _Watched(io.RawIOBase):
    """A stream of a file's bytes, unpacked, that notes which share of the file is read and raises NulByte."""

    def __init__(self, file: InputFile) -> None:
        self.file = file
        self.stored = open(file.name, "rb")  # by Python, since names may not be UTF-8
        self.size = max(1, os.path.getsize(file.name))
        self.stream = unpacked(self.stored)
        check_head(file, peeked(self.stream))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.stream.readinto(buffer)
        if b"\0" in bytes(buffer[:count]):
            raise NulByte
        self.file.share_read = self.stored.tell() / self.size
        return count

    def close(self) -> None:
        self.stored.close()
        super().close()


def opened(file: InputFile, newline: str = "\n") -> IO[str]:
    """Opens a file for reading as text, unpacked. Raises ValueError if it holds something else; reading raises NulByte
    or UnicodeDecodeError."""
    stream = io.BufferedReader(_Watched(file), BUFFER)
    return io.TextIOWrapper(stream, "utf-8-sig", newline=newline)


def check_head(file: InputFile, head: bytes) -> None:
    """Raises ValueError, which says what to do, if a file begins like something else than its kind."""
    found = signature_of(head, text_may_be_a_page=file.kind == "text")
    if found and found.name != file.kind:
        raise ValueError(f"it is {found.title}; {found.advice(file.name)}")


def fault_in(name: str, deadline: float = float("inf")) -> str:
    """Returns where a file of text is not UTF-8, and what to do; "" if it is, or if that is not known at `deadline`."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    start = 0  # of the block
    with open(name, "rb") as file:
        stream = unpacked(file)
        is_end = False
        while not is_end and time.monotonic() < deadline:
            block = stream.read(BLOCK)
            is_end = not block
            place = block.find(b"\0")
            if place >= 0:
                return _described(name, start + place)
            undecoded, _ = decoder.getstate()
            try:
                decoder.decode(block, final=is_end)
            except UnicodeDecodeError as error:
                return _described(name, start - len(undecoded) + error.start)
            start += len(block)
    return ""


def _described(name: str, fault: int) -> str:
    """Returns what is wrong at byte `fault` of a file, counted from 0, and what to do."""
    line = 1
    start = 0
    with open(name, "rb") as file:
        stream = unpacked(file)
        head = peeked(stream)
        while start + BLOCK < fault - AROUND:
            line += stream.read(BLOCK).count(b"\n")
            start += BLOCK
        before = stream.read(fault - start)
        line += before.count(b"\n")
        around = before[-AROUND:] + stream.read(AROUND)
    byte = around[min(len(before), AROUND)]
    place = f"byte {fault + 1:,}, on line {line:,}, is 0x{byte:02x}"
    encoding = _encoding_at_the_start(head)
    if encoding:
        command = f"iconv -f {encoding} -t UTF-8"
        return f"its text is {encoding}; convert it: {converting(name, command)}"
    if len(CONTROLS.findall(around)) * 100 > len(around) or around.count(0) * 2 > len(around):
        return f"{place}: {BINARY.title}, not text; {BINARY.advice(name)}"
    if byte == 0:
        return f"{place}, which no text holds; without such bytes: {converting(name, DROP_NUL)}"
    encoding = _encoding_around(around)
    if encoding == "UTF-8":
        return f"{place}, which is not UTF-8; without such bytes: {converting(name, DROP_INVALID)}"
    command = f"iconv -f {encoding} -t UTF-8"
    if encoding == UNKNOWN:
        return f"{place}: its text is not UTF-8; convert it from what it is: {converting(name, command)}"
    return f"{place}: its text looks like {encoding}; convert it: {converting(name, command)}"


def _encoding_at_the_start(head: bytes) -> str:
    """Returns the encoding, of UTF-16 and UTF-32, that the first bytes of a file show; "" if it is another."""
    candidates = [encoding for mark, encoding in MARKS.items() if head.startswith(mark)]
    if not candidates and head[1::2].count(0) * 3 > len(head):
        candidates = ["UTF-16LE"]
    if not candidates and head[::2].count(0) * 3 > len(head):
        candidates = ["UTF-16BE"]
    for encoding in candidates:
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(head)
        except UnicodeDecodeError:
            continue
        if looks_like_text(text):
            return encoding
    return ""


def _encoding_around(around: bytes) -> str:
    """Returns the encoding that the bytes around a fault seem to be in: UTF-8 if a few of them are wrong."""
    runs = OTHER_BYTES.findall(around)
    valid = sum(bool(run.decode("utf-8", "ignore")) for run in runs)
    single = len(BYTE_BY_A_LETTER.findall(around))
    is_rare = len(runs) < len(around) / 4096
    if is_rare or valid and valid * 2 >= len(runs):
        return "UTF-8"
    if single * 5 > len(runs) * 3 and not UNDEFINED.search(around):
        return "CP1252"
    return UNKNOWN if sum(map(len, runs)) * 5 > len(around) else "UTF-8"


def looks_like_text(text: str) -> bool:
    """Returns whether hardly any character is a control character or has no meaning."""
    odd = [
        unicodedata.category(character) in ("Cc", "Cn", "Co") and not character.isspace()
        for character in text
    ]
    return sum(odd) * 100 <= len(text)


def converting(name: str, command: str) -> str:
    """Returns the command that gives the text of a file to `command`, and writes what comes out to a file next to
    it."""
    path = Path(name)
    if path.suffix.lower() in COMPRESSED:
        path = path.with_suffix("")
    written = shlex.quote(str(path.with_suffix(f".fixed{path.suffix}")))
    compression = compression_of(name)
    if compression:
        return f"{UNPACKING[compression]} < {shlex.quote(name)} | {command} > {written}"
    return f"{command} < {shlex.quote(name)} > {written}"
