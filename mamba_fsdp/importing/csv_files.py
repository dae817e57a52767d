"""Reads the rows of CSV files."""

import csv
import itertools
from collections.abc import Iterator

from mamba_fsdp.importing.inputs import Document, Fault, InputFile
from mamba_fsdp.importing.json_records import document_from_record
from mamba_fsdp.importing.kinds import CLEAN
from mamba_fsdp.importing.text_files import MAX_TEXT_LENGTH, open_text, read_lines
from mamba_fsdp.settings.dataset_config import DatasetConfig

DELIMITERS = ",;\t|"  # the default is the one that is most frequent in the header

csv.field_size_limit(MAX_TEXT_LENGTH)  # the default limit, 128 KiB, is shorter than a book


def csv_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document | Fault]:
    """Yields the field options.text_column of each row. Lines can also end with a single CR.

    Raises ValueError if the header or a row is not valid."""
    with open_text(file, options.encoding, newline="") as stream:
        lines = read_lines(stream)
        header = next(lines, "")
        delimiter = options.delimiter or max(DELIMITERS, key=header.count)
        rows = csv.DictReader(itertools.chain([header], lines), delimiter=delimiter, strict=True)
        try:
            _check_header(list(rows.fieldnames or []), options.text_column)
            for row in rows:
                yield _document_of(row, rows, options.text_column)
        except csv.Error as error:
            is_too_long = "field limit" in str(error)
            advice = CLEAN if is_too_long else "double each quote inside a field"
            raise ValueError(f"after line {rows.line_num:,}: {error}; {advice}") from None


def _document_of(row: dict, rows: csv.DictReader, column: str) -> Document | Fault:
    place = f"line {rows.line_num:,}"
    if None in row.values():
        return Fault(
            f"{place} has fewer fields than the header", "quote fields that contain a line break"
        )
    if any(row.pop(None, [])):
        delimiter = rows.reader.dialect.delimiter
        return Fault(
            f"{place} has more fields than the header", f"quote fields that contain {delimiter!r}"
        )
    return document_from_record(place, row, column)


def _check_header(header: list[str], column: str) -> None:
    """Raises ValueError if a CSV header contains `column` twice, or only one other field.

    `document_from_record` reports any other header without `column`."""
    if header.count(column) > 1:
        raise ValueError(f"the header contains {column!r} twice; rename one of the two fields")
    if len(header) == 1 and header[0] != column:
        raise ValueError(
            f"the header has only one field, {header[0]!r}; give the separator of the fields with --delimiter"
        )
