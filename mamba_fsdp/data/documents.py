"""What a document is: a block of the input, as text.py cuts it, becomes texts or token ids. Runs in the workers.

text files      the whole file, or what --documents cuts it into
JSON lines      a record's --text_column
tables, CSV     a row's --text_column: text, or in tables a list of token ids
"""

import json
import re
from collections.abc import Collection, Iterator, MutableMapping
from typing import Any, NamedTuple

import numpy as np

from config.dataset_config import DatasetConfig
from mamba_fsdp.errors import UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CONVERT = (
    "what is in another encoding is converted with iconv -f UTF-16 (or LATIN1) -t UTF-8 FILE > NEW"
)


class TextBlock(NamedTuple):
    """A stretch of the input, cheap to cut and to send."""

    name: str  # the file, for messages
    kind: str  # text: bytes of text; json: bytes of whole lines, or a list's elements; rows: bytes, token ids or None
    data: bytes | list
    done: float  # input read up to its end, in the source's unit
    size: int  # about how many bytes of text it holds
    record: int = 1  # number of the first record in it, of text the first line
    offset: int = (
        0  # where data begins in the file, in bytes after decompression (not counted for rows)
    )
    inside: bool = False  # begins within the document that the block before left open
    open: bool = False  # its last document ends in a later block
    since: int = 0  # byte of the file from which on records are numbered


def separator_of(options: DatasetConfig) -> re.Pattern[bytes] | None:
    """What stands between documents of a text file; None where the file is one."""
    kind, _, text = options.documents.partition(":")
    pattern = {
        "file": b"",
        "lines": rb"\r?\n",
        "blank_line": rb"\n(?:[ \t\r]*\n)+",
        "separator": re.escape(text.encode()),
    }[kind]
    return re.compile(pattern) if pattern else None


def documents(
    block: TextBlock, options: DatasetConfig, counts: MutableMapping[str, int]
) -> Iterator[tuple[str | np.ndarray, bool]]:
    """Yields (text or token ids (n,), whether the document ends with it); counts what is left out in `counts`.

    counts: documents that are `empty` (nothing but white space). Raises UserError, which names file and record or byte,
    for what is no valid UTF-8, no valid JSON or no text.
    """
    if isinstance(block.data, bytes) and block.offset == 0 and options.invalid_utf8 == "error":
        # UTF-16 and UTF-32 have a byte order mark, or 0 in every other byte, which is valid UTF-8.
        zeros = block.data.count(0, 0, 4096)
        if block.data.startswith((b"\xff\xfe", b"\xfe\xff")) or 8 * zeros > len(block.data[:4096]):
            raise UserError(f"{block.name}: looks like UTF-16 or UTF-32; {CONVERT}")
    if block.kind == "text":
        yield from _text_documents(block, options, counts)
        return
    records = (
        _json_records(block, options)
        if block.kind == "json"
        else enumerate(block.data, block.record)
    )
    for record, value in records:
        if isinstance(value, str):
            value = value.encode(
                errors="surrogatepass"
            )  # JSON can spell half a character, which is no valid UTF-8
        if isinstance(value, bytes):
            value = _decode(value, block.name, f" of record {record}", 0, options)
        elif isinstance(value, (list, np.ndarray)):
            value = _token_ids(f"{block.name}: record {record}", options.text_column, value)
        elif value is not None:
            raise UserError(
                f"{block.name}: record {record}: {options.text_column!r} is {type(value).__name__}, not "
                "text; name another with --text_column"
            )
        if value is None or len(value) == 0 or isinstance(value, str) and value.isspace():
            counts["empty"] += 1
        else:
            yield value, True


def _json_records(block, options):
    lines = block.data
    if isinstance(lines, bytes):
        lines = lines.removeprefix(BYTE_ORDER_MARK if block.offset == 0 else b"").split(b"\n")
    for number, line in enumerate(lines, block.record):
        record = f"{number} after byte {block.since}" if block.since else number
        line = _decode(line, block.name, f" of record {record}", 0, options)
        if not line or line.isspace():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = "nested too deeply" if isinstance(error, RecursionError) else error
            raise UserError(f"{block.name}: record {record} is no valid JSON ({why})") from error
        yield record, field_of(f"{block.name}: record {record}", options.text_column, fields)


def _text_documents(block, options, counts):
    separator = separator_of(options)
    start = (
        len(BYTE_ORDER_MARK) if block.offset == 0 and block.data.startswith(BYTE_ORDER_MARK) else 0
    )
    begins = not block.inside
    cuts = [match.span() for match in separator.finditer(block.data)] if separator else []
    for end, next_start in [*cuts, (len(block.data), None)]:
        ends = next_start is not None or not block.open
        text = _decode(block.data[start:end], block.name, "", block.offset + start, options)
        if separator:  # line breaks beside a separator belong to it
            text = text.lstrip("\r\n") if begins else text
            text = text.rstrip("\r\n") if ends else text
        if not (begins and ends):
            yield text, ends
        elif text and not text.isspace():
            yield text, True
        elif not (separator and next_start is None and start == end):
            counts["empty"] += 1  # but nothing after a last separator is no document
        start, begins = next_start, True


def _decode(data, name, where, offset, options):
    """The text of `data`, which begins at `offset` of its file or record."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if options.invalid_utf8 == "replace":
            return data.decode(errors="replace")
        raise UserError(
            f"{name}: invalid UTF-8 at byte {offset + error.start}{where}; --invalid_utf8=replace puts "
            f"U+FFFD in its place, and {CONVERT}"
        ) from error


def _token_ids(where, column, values):
    try:
        ids = np.asarray(values)
    except ValueError:  # lists within the list
        ids = np.asarray(values, dtype=object)
    if ids.size and ids.dtype.kind not in "iu":
        raise UserError(f"{where}: {column!r} is a list of other things than token ids")
    return ids.astype(np.int64)


def field_of(where: str, column: str, fields: Any) -> Any:
    """What `column` names in a record; document.text is the field text of document, and None where that is. Raises
    UserError, which says `where`."""
    if not isinstance(fields, dict):
        raise UserError(f"{where} is {type(fields).__name__}, not an object with text in it")
    if column in fields:
        return fields[column]
    first, _, rest = column.partition(".")
    check_column(where, first if rest else column, fields)
    if rest and not isinstance(fields[first], dict | None):
        raise UserError(
            f"{where}: {first!r} is {type(fields[first]).__name__}, without a field {rest!r}"
        )
    return None if fields[first] is None else field_of(f"{where}: {first!r}", rest, fields[first])


def check_column(name: str, column: str, columns: Collection[str]) -> None:
    """Raises UserError where `columns`, those of `name`, lack `column`."""
    if column not in columns:
        hint = (
            "--text_column=input_ids takes its token ids as they are"
            if "input_ids" in columns
            else "name one with --text_column"
        )
        raise UserError(
            f"{name}: there is no column {column!r}; it has: {', '.join(map(str, columns))}; {hint}"
        )
