"""A JSON file that is one list, read as blocks of its elements: in constant memory, and resumed behind any of them."""

import codecs
import json
import re
from collections.abc import Iterator

from mamba_fsdp.data.documents import TextBlock
from mamba_fsdp.errors import UserError

BLANK = re.compile(r"[\ufeff \t\r\n]*")
DECODER = json.JSONDecoder()
LONGEST_WORD = 16  # characters, as in -Infinity: what looks wrong so near to the end may only be cut there


def array_blocks(path: str, stretches: Iterator[tuple[bytes, float]], block_bytes: int, offset: int = 0,
                 record: int = 1) -> Iterator[TextBlock]:
    """Blocks of kind json of about `block_bytes`, one element a line.

    stretches: (bytes, share of the file read) from byte `offset` on: the file's beginning, or behind an element.
    record: number of the element that follows. Raises UserError for what is no list, naming the element.
    """
    window = _Window(path, stretches, offset)
    lines: list[bytes] = []
    first, begin, size, expected = record, offset, 0, ",]" if offset else "["
    while (sign := window.next()) in expected and sign:
        if sign == "]" and lines:
            yield _block(window, lines, first, begin, record)
        window.take(window.at + 1)
        if sign == "]":
            if window.next():
                raise UserError(f"{path}: something stands behind the list's end, after {record - 1} records")
            return
        if sign == "[" and window.next() == "]":
            expected = "]"
            continue
        window.next()
        lines.append(window.take(window.end_of_element(record)).replace("\n", " ").encode(errors="surrogateescape"))
        record, size, expected = record + 1, size + len(lines[-1]), ",]"
        if size >= block_bytes:
            yield _block(window, lines, first, begin, record)
            lines, first, begin, size = [], record, window.offset, 0
    raise UserError(f"{path}: after {record - 1} records comes {sign or 'its end'}, where {' or '.join(expected)} is "
                    "expected; is it truncated?")


def _block(window, lines, first, begin, record):
    return TextBlock(window.path, "json", b"\n".join(lines), {"offset": window.offset, "record": record, "array": True},
                     window.done, first, begin)


class _Window:
    """What is read of a file and not yet used, as text. Bytes that are no valid UTF-8 survive as half characters."""

    def __init__(self, path, stretches, offset):
        self.path, self.offset, self._stretches = path, offset, stretches
        self.text, self.at, self.done = "", 0, 0.0
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode

    def take(self, end):
        """The text up to `end`, which counts as used then."""
        taken, self.at = self.text[self.at:end], end
        self.offset += len(taken.encode(errors="surrogateescape"))
        return taken

    def more(self):
        """Whether there was more. Reads as much again as is at hand: a long element is not parsed too often."""
        parts = [self.text[self.at:]]
        wanted, self.at = len(parts[0]) + 1, 0
        while wanted > 0 and (stretch := next(self._stretches, None)):
            self.done = stretch[1]
            parts.append(self._decode(stretch[0]))
            wanted -= len(parts[-1])
        self.text = "".join(parts)
        return len(parts) > 1

    def next(self):
        """The first character behind blanks, or "" at the file's end."""
        while True:
            self.take(BLANK.match(self.text, self.at).end())
            if self.at < len(self.text) or not self.more():
                return self.text[self.at:self.at + 1]

    def end_of_element(self, record):
        """Where the element ends that begins here."""
        while True:
            fault = "the list has no end"
            try:
                end = DECODER.raw_decode(self.text, self.at)[1]
                if self.text[end:end + 1] in [*",] \t\r\n"] or len(self.text) - end > LONGEST_WORD:
                    return end  # else a number may go on
            except json.JSONDecodeError as error:
                fault = error.msg
                if not (fault.startswith("Unterminated") or error.pos > len(self.text) - LONGEST_WORD):
                    raise UserError(f"{self.path}: record {record} is no valid JSON ({fault})") from error
            except RecursionError as error:
                raise UserError(f"{self.path}: record {record} is nested too deeply") from error
            if not self.more():
                raise UserError(f"{self.path}: record {record} is no valid JSON ({fault}); is the file truncated?")
