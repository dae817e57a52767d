"""A file of text of any kind as blocks: cut cheaply and in order by one process, for many to turn into documents.

A block is about BLOCK_BYTES long whatever the file's size. Read again, a file gives the same blocks: how many of them
are done says where work resumes. Here a block's `done` is the share of the file that is read. Arrow is imported late:
it takes a while.
"""

import contextlib
import itertools
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from config.dataset_config import DatasetConfig
from mamba_fsdp.data.documents import (
    BYTE_ORDER_MARK,
    CONVERT,
    TextBlock,
    check_column,
    separator_of,
)
from mamba_fsdp.data.foreign import arrow
from mamba_fsdp.errors import UserError, first_line

Item = TypeVar("Item")
BLOCK_BYTES = 1 << 19
ROWS = 128  # of a table in a block
CSV_RECORD = 1 << 24  # bytes: the longest record of a CSV file
ARCHIVES = {".gz": "gzip", ".zst": "zstd"}
# Cuts that don't change what a byte-level tokenizer makes of a long document: after a line break, else before a blank.
GOOD_CUTS = (re.compile(rb"(?<=\S\n)(?=\S)"), re.compile(rb"(?<=\S)(?= \S)"))
# What parts the elements of a JSON list, and what may hide it: brackets, and quotes.
SIGNS, BRACKETS, QUOTE = re.compile(rb'["[\]{,]'), re.compile(rb'["[\]{}]'), re.compile(rb'"')


def read_blocks(
    path: str, kind: str, options: DatasetConfig, start: int | None = 0, end: int | None = None
) -> Iterator[TextBlock]:
    """Of a file, from `start` to `end`, both as `place_to_cut` gives them. Raises UserError."""
    column = options.text_column
    with _named_errors(path, kind):
        if kind == "json" and _is_list(path):
            yield from _list_blocks(path)
        elif kind in ("text", "json"):
            yield from cut_blocks(path, kind, separator_of(options), start or 0, end)
        else:
            batches = {"parquet": _parquet_batches, "arrow": _arrow_batches, "csv": _csv_batches}[
                kind
            ]
            yield from table_blocks(path, column, batches(path, column, start, end))


def place_to_cut(path: str, kind: str, options: DatasetConfig, at: float) -> int | None:
    """Where in a file the first document behind `at` bytes begins: a byte of text or JSON lines, the number of a row
    group of parquet or record batch of Arrow; None for the end, as in a file that can't be cut. Raises UserError."""
    size = os.path.getsize(path)
    if not 0 < at < size:
        return None if at > 0 else 0
    with _named_errors(path, kind):
        if kind in ("parquet", "arrow"):
            shares = (
                _groups_of_parquet(path)
                if kind == "parquet"
                else itertools.chain(
                    [0.0], (done for _, _, done in _arrow_batches(path, options.text_column))
                )
            )
            return next(
                (number for number, before in enumerate(shares) if before * size >= at), None
            )
        separator = (
            re.compile(b"\n")
            if kind == "json"
            else separator_of(options)
            if kind == "text"
            else None
        )
        if not separator or _compression(path) or kind == "json" and _is_list(path):
            return None
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            match = separator.search(content, int(at))
            return match.end() if match and match.end() < size else None


@contextlib.contextmanager
def _named_errors(path, kind):
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith("pyarrow"):
            raise
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


def _stretches(path, start=0, end=None):
    """Yields (bytes [start, end) of what a file holds, decompressed; share of the file read)."""
    size = os.path.getsize(path)
    with open(path, "rb") as file, _unpacked(path, file) as data:
        if start:
            data.seek(start)
        while stretch := data.read(
            BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - data.tell())
        ):
            yield stretch, file.tell() / size


def grouped(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Lists of items whose sizes add up to `most` or a little more, the last one to less."""
    group, held = [], 0
    for item in items:
        group.append(item)
        held += size(item)
        if held >= most:
            yield group
            group, held = [], 0
    if group:
        yield group


# ---------------------------------------------------------------- text and JSON lines


def cut_blocks(
    path: str,
    kind: str,
    separator: re.Pattern[bytes] | None,
    start: int = 0,
    end: int | None = None,
) -> Iterator[TextBlock]:
    """Of text, whose documents `separator` parts, or of JSON lines."""
    record, offset, inside = 1, start, False
    for data, open, done in _cut(
        path, start, end, _cut_lines if kind == "json" else partial(_cut_text, separator)
    ):
        yield TextBlock(path, kind, data, done, len(data), record, offset, inside, open, start)
        record, offset, inside = record + data.count(b"\n"), offset + len(data), open


def _cut(path, start, end, find_cut):
    """Yields (bytes, whether cut inside a document, share read), cut where find_cut(buffer) says, 0 asking for more."""
    buffer, done = bytearray(), 1.0
    for stretch, done in _stretches(path, start, end):
        buffer += stretch
        while len(buffer) > BLOCK_BYTES:
            cut, open = find_cut(buffer)
            if not cut:
                break
            yield bytes(buffer[:cut]), open, done
            del buffer[:cut]
    if buffer or not start:
        yield bytes(buffer), False, done


def _cut_lines(buffer):
    return buffer.rfind(b"\n", 0, BLOCK_BYTES) + 1 or buffer.find(b"\n", BLOCK_BYTES) + 1, False


def _cut_text(separator, buffer):
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


# ---------------------------------------------------------------- a JSON file that is one list


def _is_list(path):
    beginning = next((data for data, _ in _stretches(path) if data.strip()), b"")
    return beginning.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")


def _list_blocks(path):
    record = 1
    for group in grouped(
        list_elements(path, _stretches(path)), lambda element: len(element[0]), BLOCK_BYTES
    ):
        elements = [element for element, _ in group]
        yield TextBlock(path, "json", elements, group[-1][1], sum(map(len, elements)), record)
        record += len(group)


def list_elements(
    path: str, stretches: Iterator[tuple[bytes, float]]
) -> Iterator[tuple[bytes, float]]:
    """Yields (an element, unparsed; share of the file read), in the memory of the longest. stretches: (bytes, share)
    from the beginning on. Raises UserError for a list without an end, or with something behind it."""
    buffer, at, depth, quoted, record = bytearray(), 0, 0, False, 1
    for stretch, done in stretches:
        buffer += stretch
        while sign := (QUOTE if quoted else BRACKETS if depth > 1 else SIGNS).search(buffer, at):
            (begin, at), found = sign.span(), sign[0]
            if found == b'"':
                quoted = not quoted or _is_escaped(buffer, begin)
                continue
            if depth == 1 and found in b",]":
                if buffer[:begin].strip():
                    yield bytes(buffer[:begin]), done
                elif found == b"," or record > 1:
                    raise UserError(f"{path}: record {record} is no valid JSON (it is empty)")
                record += 1
            if depth == 0 or depth == 1 and found in b",]":
                del buffer[:at]
                at = 0
            depth += (found in b"[{") - (found in b"]}")
            if depth == 0:
                if buffer.strip() or any(data.strip() for data, _ in stretches):
                    raise UserError(
                        f"{path}: something stands behind the list's end, after record {record - 1}"
                    )
                return
        at = len(buffer)
    raise UserError(
        f"{path}: record {record} is no valid JSON (the list has no end; is the file truncated?)"
    )


def _is_escaped(buffer, at):
    """Whether an odd number of backslashes stands before `at`, which is in quotes."""
    before = at
    while buffer[before - 1] == ord("\\"):
        before -= 1
    return (at - before) % 2 == 1


# ---------------------------------------------------------------- tables


def table_blocks(name: str, column: str, batches: Iterator[tuple]) -> Iterator[TextBlock]:
    """A column's rows. batches: (rows before, an Arrow table or batch, `done` behind it)."""
    for before, batch, done in batches:
        array = _column_of(name, column, batch)
        for start in range(0, len(array), ROWS):
            rows = _values(array[start : start + ROWS])
            size = sum(len(row) for row in rows if row is not None)
            yield TextBlock(name, "rows", rows, done, size, before + start + 1)


def _parquet_batches(path, column, start=0, end=None):
    """Of its row groups [start, end)."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    _column_of(path, column, file.schema_arrow.empty_table())
    row = sum(file.metadata.row_group(number).num_rows for number in range(start))
    for batch in file.iter_batches(
        ROWS, row_groups=range(file.num_row_groups)[start:end], columns=[column], use_threads=False
    ):
        yield row, batch, (row + len(batch)) / file.metadata.num_rows
        row += len(batch)


def _groups_of_parquet(path):
    """Yields the share of a parquet file's rows that stands before each of its row groups."""
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(path)
    sizes = (metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
    *before, total = itertools.accumulate(sizes, initial=0)
    return (row / total for row in before)


def _arrow_batches(path, column, start=0, end=None):
    """Its record batches [start, end), which stand behind each other only."""
    row, read = 0, 0
    for number, (whole, batch) in enumerate(itertools.islice(arrow.batches(Path(path)), end)):
        read += batch.nbytes
        if number >= start:
            yield row, batch, read / whole.size
        row += len(batch)


def _csv_batches(path, column, *_):
    """All, of a file whose first line names its columns."""
    import pyarrow

    try:
        with pyarrow.OSFile(path) as file:
            check_column(path, column, _open_csv(path, file).schema.names)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: its first line is no valid UTF-8; {CONVERT}") from error
    with pyarrow.OSFile(path) as file:
        row, size = 0, file.size()
        for batch in _open_csv(
            path, file, include_columns=[column], column_types={column: pyarrow.binary()}
        ):
            yield row, batch, file.tell() / size
            row += len(batch)


def _open_csv(path, file, **columns):
    from pyarrow import csv

    return csv.open_csv(
        _unpacked(path, file),
        csv.ReadOptions(use_threads=False, block_size=CSV_RECORD),
        csv.ParseOptions(newlines_in_values=True),
        csv.ConvertOptions(check_utf8=False, **columns),
    )


def _column_of(name, column, table):
    """An Arrow table's column as an array of bytes (text: a worker decodes, and knows where it fails) or of lists of
    token ids; document.text is the field text of document, null where that is. Raises UserError where there is none,
    where it is of another type, or damaged."""
    import pyarrow

    if isinstance(table, pyarrow.RecordBatch):
        table = pyarrow.Table.from_batches([table])
    while (
        column not in table.column_names
        and (flat := table.flatten()).column_names != table.column_names
    ):
        table = flat
    check_column(name, column, table.column_names)
    array, kind = table[column], pyarrow.large_binary()
    coded = pyarrow.types.is_dictionary(array.type)
    held = array.type.value_type if coded else array.type
    if not (hasattr(held, "value_type") and pyarrow.types.is_integer(held.value_type)):
        try:
            array = array.cast(pyarrow.dictionary(array.type.index_type, kind) if coded else kind)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
            raise UserError(
                f"{name}: column {column!r} is {array.type}, not text or token ids; name another "
                "--text_column"
            ) from error
    return arrow.undamaged(name, column, array).combine_chunks()


def _values(array) -> list[Any]:
    """What _column_of gives as a list of bytes, lists of token ids, or None."""
    array = array.dictionary_decode() if hasattr(array, "dictionary_decode") else array
    if not hasattr(array.type, "value_type"):
        return array.to_pylist()
    return [
        None if row.values is None else row.values.to_numpy(zero_copy_only=False) for row in array
    ]
