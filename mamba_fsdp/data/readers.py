"""A file of text of any kind as blocks: cut cheaply and in order by one process, for many to turn into documents.

A block is about BLOCK_BYTES long whatever the file's size, and says where reading resumes after it. Here its `done` is
the share of the file that is read. Arrow is imported late: it takes a while.
"""

import bisect
import codecs
import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterator

from config.dataset_config import DatasetConfig
from mamba_fsdp.data.documents import BYTE_ORDER_MARK, CONVERT, TextBlock, check_column, separator_of, token_ids
from mamba_fsdp.errors import UserError, first_line

BLOCK_BYTES = 1 << 19
READ_BYTES = 1 << 16
ROWS = 128  # of a table in a block
CSV_RECORD = 1 << 24  # bytes: the longest record of a CSV file
ARCHIVES = {".gz": "gzip", ".zst": "zstd"}
TABLES = ("csv", "parquet", "arrow")
LINE_BREAK = re.compile(b"\n")
# Cuts that don't change what a byte-level tokenizer makes of a long document: after a line break, else before a blank.
GOOD_CUTS = (re.compile(rb"(?<=\S\n)(?=\S)"), re.compile(rb"(?<=\S)(?= \S)"))
DECODER = json.JSONDecoder()
BLANK = "[\ufeff \t\r\n]*"
SIGN = re.compile(rf"{BLANK}(\[{BLANK}\]|[][,])?{BLANK}")  # before an element of a JSON list, or behind the last
LONGEST_WORD = 16  # characters, as in -Infinity: what looks wrong so near to the end may only be cut there


def read_blocks(path: str, kind: str, options: DatasetConfig, position: dict | None = None, end: dict | None = None
                ) -> Iterator[TextBlock]:
    """Of a file, from `position` to `end`, both positions of blocks; None for its two ends. Raises UserError."""
    position, end = position or {}, end or {}
    with _named_errors(path, kind):
        if kind == "text":
            yield from _read_text(path, separator_of(options), end.get("offset"), **position)
        elif kind == "json":
            yield from _read_json(path, end.get("offset"), **position)
        else:
            batches = _BATCHES[kind](path, options.text_column, position.get("row", 0))
            yield from table_blocks(path, options.text_column, batches, position.get("row", 0), end.get("row"))


def place_to_cut(path: str, kind: str, options: DatasetConfig, low: int, high: int) -> dict | None:
    """The position of the first document whose separator begins in bytes [low, high) of a file, or of a table's first
    row group or record batch there; None for none. Raises UserError."""
    with _named_errors(path, kind):
        if kind in ("parquet", "arrow"):
            size = os.path.getsize(path)
            places = ((row, share * size) for row, share in _row_groups(path, kind, options.text_column))
            return next(({"row": row} if at < high else None for row, at in places if at >= low), None)
        separator = LINE_BREAK if kind == "json" else separator_of(options) if kind == "text" else None
        if not separator or _compression(path) or kind == "json" and _is_array(path):
            return None
        offset = _next_document(path, separator, low, high)
    return {"offset": offset, **({"since": offset} if kind == "json" else {})} if offset else None


@contextlib.contextmanager
def _named_errors(path, kind):
    broken: tuple = ()
    if kind in TABLES:
        import pyarrow

        broken = (pyarrow.ArrowException,)
    try:
        yield
    except (OSError, *broken) as error:
        if getattr(error, "strerror", None):
            raise UserError(f"{path}: can't be read ({error.strerror})") from error
        raise UserError(f"{path}: broken, or no {kind} file ({first_line(error)})") from error


def _compression(path):
    return ARCHIVES.get(os.path.splitext(path)[1].lower())


def _unpacked(path, file):
    if not _compression(path):
        return file
    import pyarrow

    return pyarrow.CompressedInputStream(file, _compression(path))


def _stretches(path, offset=0, end=None):
    """Yields (bytes from `offset` on, decompressed; share of the file read); an archive has no `end`."""
    size = os.path.getsize(path)
    with open(path, "rb") as file, _unpacked(path, file) as data:
        if data is file:
            file.seek(offset)
            while stretch := file.read(min(BLOCK_BYTES, max(0, (end or size) - file.tell()))):
                yield stretch, file.tell() / size
            return
        for start in range(0, offset, READ_BYTES):
            data.read(min(READ_BYTES, offset - start))
        while stretch := data.read(READ_BYTES):
            yield stretch, file.tell() / size


# ---------------------------------------------------------------- text and JSON lines

def _cut(path, offset, end, find_cut):
    """Yields (bytes, whether cut inside a document, share read), cut where find_cut(buffer) says, 0 asking for more."""
    buffer, done = bytearray(), 1.0
    for stretch, done in _stretches(path, offset, end):
        buffer += stretch
        while len(buffer) > BLOCK_BYTES:
            cut, open = find_cut(buffer)
            if not cut:
                break
            yield bytes(buffer[:cut]), open, done
            del buffer[:cut]
    if buffer or not offset:
        yield bytes(buffer), False, done


def _read_text(path, separator, end=None, offset=0, inside=False):
    for data, open, done in _cut(path, offset, end, lambda buffer: _cut_text(buffer, separator)):
        position = {"offset": offset + len(data) or 1, "inside": open}  # 1: behind an empty file
        yield TextBlock(path, "text", data, position, done, offset=offset, inside=inside, open=open)
        offset, inside = offset + len(data), open


def _cut_text(buffer, separator):
    """After the last document that surely ended, else where words part."""
    window = bytes(buffer[:BLOCK_BYTES])
    if separator:
        sure = len(window.rstrip())  # a separator that touches the window's end may end behind it
        ends = [match.end() for match in separator.finditer(window) if match.end() < sure]
        if ends:
            return ends[-1], False
    return cut_words(window), True


def cut_words(window: bytes) -> int:
    """Where to cut a stretch of a long document: late, where words part, never within a UTF-8 character."""
    tail = len(window) * 7 // 8
    for pattern in GOOD_CUTS:
        cuts = [match.start() for match in pattern.finditer(window, tail)]
        if cuts:
            return cuts[-1]
    cut = len(window)
    while cut > len(window) - 4 and window[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    return cut - 1 if window[cut - 1] >= 0xC0 else len(window)


def _next_document(path, separator, low, high):
    """Where the first document begins behind a separator that begins in bytes [low, high); None where none does."""
    window, longest = b"", len(separator.pattern)
    for stretch, _ in _stretches(path, low):
        window += stretch
        sure = len(window.rstrip())  # a separator that touches the window's end may end behind it
        match = separator.search(window)
        if match and match.end() < sure:
            return low + match.end() if low + match.start() < high else None
        done = match.start() if match else max(0, sure - longest)
        window, low = window[done:], low + done
        if low >= high:
            break
    return None


def _read_json(path, end=None, offset=0, record=1, since=0, array=False):
    if array or not offset and _is_array(path):
        yield from array_blocks(path, _stretches(path, offset), offset, record)
        return
    for data, _, done in _cut(path, offset, end, _cut_lines):
        if data:
            position = {"offset": offset + len(data), "record": record + data.count(b"\n"), "since": since}
            yield TextBlock(path, "json", data, position, done, record, offset, since=since)
            offset, record, _ = position.values()


def _cut_lines(buffer):
    return buffer.rfind(b"\n", 0, BLOCK_BYTES) + 1 or buffer.find(b"\n", BLOCK_BYTES) + 1, False


# ---------------------------------------------------------------- a JSON file that is one list

def _is_array(path):
    beginning = next((data for data, _ in _stretches(path) if data.strip()), b"")
    return beginning.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")


def array_blocks(path: str, stretches: Iterator[tuple[bytes, float]], offset: int = 0, record: int = 1
                 ) -> Iterator[TextBlock]:
    """Blocks of kind json, one element a line, in constant memory.

    stretches: (bytes, share of the file read) from byte `offset` on: the file's beginning, or behind an element.
    record: number of the element that follows. Raises UserError for what is no list, naming the element.
    """
    decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode  # what is invalid survives
    text, at, done, expected, lines, first, begin, size = "", 0, 0.0, ",]" if offset else "[", [], record, offset, 0
    while expected:
        try:
            start, end, expected = _element(text, at, expected)
        except ValueError as error:
            parts, wanted = [text[at:]], len(text) - at + 1  # as much again: a long element is not parsed too often
            while error.args[1:] and wanted > 0 and (stretch := next(stretches, None)):
                parts.append(decode(stretch[0]))
                wanted, done = wanted - len(parts[-1]), stretch[1]
            if len(parts) == 1:
                raise UserError(f"{path}: record {record} is no valid JSON ({error.args[0]}"
                                f"{'; is the file truncated?' if error.args[1:] else ''})") from error
            text, at = "".join(parts), 0
            continue
        if expected:
            lines.append(text[start:end].replace("\n", " ").encode(errors="surrogateescape"))
            record, size = record + 1, size + len(lines[-1])
            offset += len(text[at:end].encode(errors="surrogateescape"))
        at = end
        if lines and (size >= BLOCK_BYTES or not expected):
            position = {"offset": offset, "record": record, "array": True}
            yield TextBlock(path, "json", b"\n".join(lines), position, done, first, begin)
            lines, first, begin, size = [], record, offset, 0
    if text[at:].strip() or any(data.strip() for data, _ in stretches):
        raise UserError(f"{path}: something stands behind the list's end, after {record - 1} records")


def _element(text, at, expected):
    """(where the next element begins and ends, what may follow: nothing behind the list's end). Raises ValueError, with
    a second argument where it may be only that the text ends too early."""
    sign = SIGN.match(text, at)
    start, found = sign.end(), sign[1] or text[sign.end():sign.end() + 1]
    if found and found[0] not in expected:
        raise ValueError(f"{found[0]} stands where {' or '.join(expected)} is expected")
    if found.endswith("]"):
        return start, start, ""
    if start == len(text):
        raise ValueError("the list has no end", True)
    try:
        end = DECODER.raw_decode(text, start)[1]
    except json.JSONDecodeError as error:
        cut = error.msg.startswith("Unterminated") or error.pos > len(text) - LONGEST_WORD
        raise ValueError(error.msg, *[True] * cut) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if text[end:end + 1] not in [*",] \t\r\n"] and len(text) - end <= LONGEST_WORD:  # a number may go on
        raise ValueError("the list has no end", True)
    return start, end, ",]"


# ---------------------------------------------------------------- tables

def table_blocks(name: str, column: str, batches: Iterator[tuple], row: int = 0, end: int | None = None
                 ) -> Iterator[TextBlock]:
    """Rows [row, end) of a column. batches: (rows before, an Arrow table or batch, `done` behind it), from `row` or
    from somewhere before it on."""
    for before, batch, done in batches:
        array = column_of(name, column, batch)[:None if end is None else max(0, end - before)]
        for start in range(max(0, row - before), len(array), ROWS):
            data, first = _values(name, column, row + 1, array[start:start + ROWS]), row + 1
            row += len(data)
            yield TextBlock(name, "rows", data, {"row": row}, done, first)
        if row == end:
            break


def _parquet_batches(path, column, row):
    """From the row group that holds `row` on."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    column_of(path, column, file.schema_arrow.empty_table())
    begins = _group_begins(file)
    group = bisect.bisect_right(begins, row) - 1
    at = begins[group]
    for batch in file.iter_batches(ROWS, row_groups=range(group, file.num_row_groups), columns=[column],
                                   use_threads=False):
        yield at, batch, (at + len(batch)) / file.metadata.num_rows
        at += len(batch)


def _group_begins(file):
    """The rows with which a parquet file's row groups begin, and the one behind the last."""
    sizes = (file.metadata.row_group(number).num_rows for number in range(file.num_row_groups))
    return list(itertools.accumulate(sizes, initial=0))


def _arrow_batches(path, column, row):
    """From the first row on."""
    import pyarrow

    with pyarrow.memory_map(path) as source:
        is_file = source.read(6) == b"ARROW1"  # else the stream form, which `datasets` writes
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        column_of(path, column, reader.schema.empty_table())
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches)) if is_file else reader
        at = 0
        for number, batch in enumerate(batches, 1):
            yield at, batch, number / reader.num_record_batches if is_file else source.tell() / source.size()
            at += len(batch)


def _csv_batches(path, column, row):
    """From the first row on, of a file whose first line names its columns; in a .tsv file tabs part them."""
    import pyarrow

    try:
        with pyarrow.OSFile(path) as file:
            check_column(path, column, _open_csv(path, file).schema.names)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: its first line is no valid UTF-8; {CONVERT}") from error
    with pyarrow.OSFile(path) as file:
        at, size = 0, file.size()
        for batch in _open_csv(path, file, include_columns=[column], column_types={column: pyarrow.binary()}):
            yield at, batch, file.tell() / size
            at += len(batch)


def _open_csv(path, file, **columns):
    from pyarrow import csv

    delimiter = "\t" if os.path.splitext(path)[0].lower().endswith(".tsv") or path.lower().endswith(".tsv") else ","
    return csv.open_csv(_unpacked(path, file), csv.ReadOptions(use_threads=False, block_size=CSV_RECORD),
                        csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                        csv.ConvertOptions(check_utf8=False, **columns))


_BATCHES = {"parquet": _parquet_batches, "arrow": _arrow_batches, "csv": _csv_batches}


def _row_groups(path, kind, column):
    """(row, share of the file before it) where a parquet file's row groups or an Arrow file's batches begin."""
    if kind == "arrow":
        before = 0.0
        for row, _, done in _arrow_batches(path, column, 0):
            yield row, before
            before = done
        return
    import pyarrow.parquet

    *begins, count = _group_begins(pyarrow.parquet.ParquetFile(path))
    yield from ((row, row / count) for row in begins)


def column_of(name, column, table):
    """An Arrow table's column as an array; document.text is the field text of document, null where that is. Raises
    UserError where there is none."""
    import pyarrow

    if isinstance(table, pyarrow.RecordBatch):
        table = pyarrow.Table.from_batches([table])
    while column not in table.column_names and (flat := table.flatten()).column_names != table.column_names:
        table = flat
    check_column(name, column, table.column_names)
    return table[column].combine_chunks()


def _values(name, column, record, array):
    """An Arrow array as a list of bytes (text), arrays of token ids, or None. Raises UserError for another type."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_null(array.type) or types.is_binary(array.type) or types.is_large_binary(array.type):
        return array.to_pylist()
    if types.is_string(array.type) or types.is_large_string(array.type):
        return array.cast(pyarrow.large_binary()).to_pylist()  # as bytes: a worker decodes, and knows where it fails
    if hasattr(array.type, "value_type") and types.is_integer(array.type.value_type):
        rows = [row.values for row in array]
        return [None if row is None else token_ids(name, column, number, row.to_numpy(zero_copy_only=False))
                for number, row in enumerate(rows, record)]
    raise UserError(f"{name}: column {column!r} is {array.type}, not text or token ids; name another --text_column")
