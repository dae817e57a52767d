"""Reads the rows of CSV files."""

import csv
import itertools
from collections.abc import Iterator
from typing import IO

from mamba_fsdp.importing.inputs import Document, Fault, InputFile
from mamba_fsdp.importing.json_records import field_of
from mamba_fsdp.importing.kinds import CLEAN
from mamba_fsdp.importing.text_files import LONGEST_TEXT, lines_of, opened
from mamba_fsdp.settings.dataset_config import DatasetConfig

DELIMITERS = ",;\t|"

csv.field_size_limit(LONGEST_TEXT)  # the library's own limit is less than a book


def csv_rows(stream: IO[str], delimiter: str = "") -> csv.DictReader:
    """Returns the rows of a CSV file as {field: text}. delimiter: by default the one that the header has most often."""
    lines = lines_of(stream)
    header = next(lines, "")
    delimiter = delimiter or max(DELIMITERS, key=header.count)
    return csv.DictReader(itertools.chain([header], lines), delimiter=delimiter, strict=True)


def csv_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document | Fault]:
    """Yields each field as the text that is written there. Lines can end with CR alone."""
    with opened(file, options.encoding, newline="") as stream:
        rows = csv_rows(stream, options.delimiter)
        try:
            _check_header(list(rows.fieldnames or []), options.text_column)
            for row in rows:
                yield _document_of(row, rows, options.text_column)
        except csv.Error as error:
            is_too_long = "field limit" in str(error)
            advice = CLEAN if is_too_long else "write a quote within a field twice"
            raise ValueError(f"after line {rows.line_num:,}: {error}; {advice}") from None


def _document_of(row: dict, rows: csv.DictReader, column: str) -> Document | Fault:
    place = f"line {rows.line_num:,}"
    if None in row.values():
        return Fault(
            f"{place} has fewer fields than the header", "put one with a line break in quotes"
        )
    if any(row.pop(None, [])):
        delimiter = rows.reader.dialect.delimiter
        return Fault(
            f"{place} has more fields than the header", f"put one with {delimiter!r} in quotes"
        )
    return field_of(place, row, column)


def _check_header(header: list[str], column: str) -> None:
    """Raises ValueError if the header of a CSV file does not identify the field of the text."""
    if header.count(column) > 1:
        raise ValueError(f"its header has {column!r} twice; rename one of them")
    if len(header) == 1 and header[0] != column:
        raise ValueError(
            f"its header is one field, {header[0]!r}; name the separator of its fields with --delimiter"
        )
