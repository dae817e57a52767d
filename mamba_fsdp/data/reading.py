"""Reads the input's files as documents: texts or arrays of token ids. `datasets` reads what a name on the Hub holds."""

import csv
import itertools
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

import datasets
import pyarrow
import pyarrow.parquet

from mamba_fsdp.data.corpus import TEXTS, Document, InputFile
from mamba_fsdp.data.importers import (
    arrow_documents,
    datalayout_documents,
    documents_in,
    flat_documents,
    megatron_documents,
)
from mamba_fsdp.data.json_records import field_of, texts_in
from mamba_fsdp.data.text_files import NulByte, check_head, fault_in, opened
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.signatures import peeked, unpacked

BLOCK = 1 << 20  # characters read at once
# Of a document, in characters. It is encoded whole, which takes some 130 bytes of memory a character.
LONGEST_TEXT = 1 << 25
LONGEST_REASON = 700  # characters, with a command
MOST_NAMED = 10  # unreadable files in one message
SECONDS_OF_LOOKING = 10.0  # for more unreadable files, after the first
SECONDS_OF_CHECKING = 60.0  # the encoding of all files, before any is read: a GB takes about one
TABLES = ("parquet", "arrow")
ROWS = 64  # of a table at a time
DELIMITERS = ",;\t|"  # of fields in CSV files
SEPARATORS = {"lines": r"\r?\n", "blank_line": r"(?:^|\n)(?:[ \t\r]*\n)+"}  # of documents in text

csv.field_size_limit(sys.maxsize)  # by default a field has a limit; here it may be a book
datasets.disable_progress_bars()
datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our own message says what went wrong
logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # it would report each retry


class UnreadableFile(UserError):
    """The error if a file of the input can't be read; its message names the file."""

    def __init__(self, message: str, file: InputFile) -> None:
        super().__init__(message)
        self.file = file


@dataclass(frozen=True)
class Position:
    """A reader's position in the input."""

    file: int = 0  # the number of the file that is being read
    row: int = 0  # documents read of that file, or stretches of long ones
    documents: int = 0  # documents of all files, if read to their ends


BEGINNING = Position()


@dataclass
class DocumentBatch:
    """Consecutive documents, all for one store."""

    position: Position  # after the last document that was read
    store: str
    documents: list[Document] = field(default_factory=list)
    size: int = 0  # characters or tokens


@dataclass
class Share:
    """The share of one part of the work: each `stride`-th document of its files, from number `first` on."""

    files: list[InputFile]
    first: int = 0
    stride: int = 1
    unreadable: dict[str, str] = field(default_factory=dict)  # {a file that is left out: its fault}

    @classmethod
    def of_part(cls, files: list[InputFile], number: int, count: int) -> "Share":
        """Returns the share of part `number` of `count`: some of the files or, if they are fewer, some documents of
        all."""
        if count > len(files):
            return cls(files, number, count)
        start = number * len(files) // count
        end = (number + 1) * len(files) // count
        return cls(files[start:end])


def read_batches(
    share: Share, options: DatasetConfig, size: int, start: Position = BEGINNING
) -> Iterator[DocumentBatch]:
    """Yields batches of about `size` characters or tokens.

    start: the position of an earlier batch, to resume after it. A file that can't be read raises UnreadableFile, or
    with skip_unreadable is noted in the share.
    """
    documents = start.documents
    batch = None
    for place, document in _documents(share, options, start.file):
        if place <= (start.file, start.row):
            continue
        store = share.files[place[0]].store
        if batch and (batch.size >= size or batch.store != store):
            yield batch
            batch = None
        if not batch:
            batch = DocumentBatch(start, store)
        if documents % share.stride == share.first:
            batch.documents.append(document)
            batch.size += len(document.content)
        if document.ends:
            documents += 1
        batch.position = Position(*place, documents)
    if batch:
        yield batch


def _documents(
    share: Share, options: DatasetConfig, first: int
) -> Iterator[tuple[tuple[int, int], Document]]:
    """Yields ((the file's number, the document's number in it from 1), the document), from file `first` on."""
    for number, file in enumerate(share.files[first:], first):
        row = 0
        document = Document("")
        try:
            for row, document in enumerate(_documents_of(file, options), 1):
                yield (number, row), document
        except UnreadableFile as error:
            if not options.skip_unreadable:
                raise
            share.unreadable[file.name] = str(error)
            if not document.ends:  # the next file's first document must not continue it
                yield (number, row + 1), Document(document.content[:0], begins=False)


def _documents_of(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    """Yields the documents of a file. Raises UnreadableFile."""
    try:
        if file.kind in TABLES:
            _check_head(file)
        for document in READERS[file.kind](file, options):
            yield _checked(document, options.vocab_size)
    except Exception as error:  # the libraries raise whatever a file runs into
        reason = getattr(error, "strerror", None) or first_line(error)[:LONGEST_REASON]
        if isinstance(error, (NulByte, UnicodeDecodeError)):
            reason = fault_in(file.name)
        raise _unreadable(file, reason) from error


def _unreadable(file: InputFile, reason: str) -> UnreadableFile:
    return UnreadableFile(f"{file.name}: can't be read as {file.kind}: {reason}", file)


def _check_head(file: InputFile) -> bool:
    """Returns whether a file is compressed. Raises ValueError if it is something else than its name says."""
    with open(file.name, "rb") as stored:
        stream = unpacked(stored) if file.kind in TEXTS else stored
        check_head(file, peeked(stream))
        return stream is not stored


def check_content(files: list[InputFile]) -> None:
    """Raises UnreadableFile for a file that is something else than its name says, or text that is not UTF-8.

    Reading finds that too, but in a large file after hours of encoding. What takes long is left to reading: compressed
    files, and what a minute does not suffice for. So is what numbers look like: they may look like anything.
    """
    deadline = time.monotonic() + SECONDS_OF_CHECKING
    for file in files:
        if file.kind not in (*TEXTS, *TABLES) or not os.path.isfile(file.name):
            continue
        try:
            is_compressed = _check_head(file)
            reason = ""
            if file.kind in TEXTS and not is_compressed:
                reason = fault_in(file.name, deadline)
        except Exception as error:
            reason = first_line(error)[:LONGEST_REASON]
        if reason:
            raise _unreadable(file, reason)
        if time.monotonic() > deadline:
            return


def name_unreadable(
    error: UnreadableFile, files: list[InputFile], options: DatasetConfig
) -> UserError:
    """Returns the error with the names of later files that can't be read either, found in a search of some seconds."""
    others = _unreadable_files(files[files.index(error.file) + 1 :], options)
    names = list(itertools.islice(others, MOST_NAMED - 1))
    message = str(error)
    if names:
        message += f"; nor can {', '.join(names)}"
    if len(files) > 1:
        message += "; --skip_unreadable skips them"
    return UserError(message)


def _unreadable_files(files: list[InputFile], options: DatasetConfig) -> Iterator[str]:
    end = time.monotonic() + SECONDS_OF_LOOKING
    for file in files:
        try:
            for _ in _documents_of(file, options):
                if time.monotonic() > end:
                    return
        except UnreadableFile:
            yield file.name


def _checked(document: Document, vocab_size: int) -> Document:
    """Returns the document, emptied if it is only white space. Raises ValueError for a text that is too long, and for
    token ids outside the vocabulary, if that is known."""
    content = document.content
    if isinstance(content, str):
        _check_length(content)
        if content.isspace():
            return Document("")
    elif vocab_size and len(content) and not 0 <= content.min() <= content.max() < vocab_size:
        raise ValueError(
            f"token ids from {content.min()} to {content.max()}, but the vocabulary has {vocab_size}; name the tokenizer "
            "that made them with --tokenizer, or their --vocab_size, or the --dtype of flat files"
        )
    return document


def _check_length(text: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise ValueError(
            f"a document has more than {LONGEST_TEXT:,} characters; split it: in a text file with "
            "--documents, or by the command split -C 32M FILE"
        )


# ---------------------------------------------------------------- tables


def _parquet_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    with open(file.name, "rb") as stream:  # by Python, since names may not be UTF-8
        rows = pyarrow.parquet.ParquetFile(stream)
        read = 0
        for batch in rows.iter_batches(batch_size=ROWS):
            read += batch.num_rows
            file.share_read = read / rows.metadata.num_rows
            yield from documents_in(pyarrow.Table.from_batches([batch]), file, options)


def _hub_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    rows = datasets.load_dataset(
        file.name, options.config or None, split=file.split, streaming=True
    )
    for table in rows.with_format("arrow").iter(batch_size=ROWS):
        yield from documents_in(table, file, options)


# ---------------------------------------------------------------- text, JSON lines and CSV

# `datasets` has builders for these formats, which are not used. Its builder for text reads a file whole, or cuts it at
# line breaks and changes these. For JSON it fails if another field is null in the first 10 MB and a text later, or is
# an object that changes its fields. For CSV it reads another column if the rows, but not the header, end with a comma.
# For Parquet, above, it fails if a file has no rows, or `::` in its path.


def _text_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    with opened(file) as stream:
        if options.documents == "file":
            yield Document(stream.read(LONGEST_TEXT + 1))
            return
        kind, _, text = options.documents.partition(":")
        separator = re.compile(SEPARATORS.get(kind) or re.escape(text))
        rest = ""
        # At least as much as the rest: so a long document is searched twice at most, not once for each block.
        while text := stream.read(max(BLOCK, len(rest))):
            *documents, rest = separator.split(rest + text)
            yield from [Document(document.strip("\r\n")) for document in documents]
            _check_length(rest)
        yield Document(rest.strip("\r\n"))


def _json_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    yield from map(Document, texts_in(file, options.text_column))


def csv_rows(stream: IO[str], delimiter: str = "") -> csv.DictReader:
    """Returns the rows of a CSV file as {field: text}. delimiter: if it is not given, the one that the header has most
    often."""
    header = stream.readline()
    delimiter = delimiter or max(DELIMITERS, key=header.count)
    lines = itertools.chain([header], stream)
    return csv.DictReader(lines, delimiter=delimiter, strict=True)


def _csv_documents(file: InputFile, options: DatasetConfig) -> Iterator[Document]:
    """Yields each field as the text that is written there. Lines may end with CR alone."""
    with opened(file, newline="") as stream:
        rows = csv_rows(stream, options.delimiter)
        try:
            _check_header(list(rows.fieldnames or []), options.text_column)
            for row in rows:
                place = f"line {rows.line_num}"
                if None in row.values():
                    raise ValueError(
                        f"{place} has fewer fields than the header; put one that holds a line break in quotes"
                    )
                if any(row.pop(None, [])):
                    raise ValueError(
                        f"{place} has more fields than the header; put one that holds {rows.reader.dialect.delimiter!r} in quotes"
                    )
                yield Document(field_of(place, row, options.text_column))
        except csv.Error as error:
            raise ValueError(
                f"after line {rows.line_num}: {error}; write a quote within a field twice"
            ) from None


def _check_header(header: list[str], column: str) -> None:
    """Raises ValueError if the header of a CSV file does not tell which field is the text."""
    if header.count(column) > 1:
        raise ValueError(f"its header has {column!r} twice; rename one of them")
    if len(header) == 1 and header[0] != column:
        raise ValueError(
            f"its header is one field, {header[0]!r}: if it should be several, name their separator with --delimiter, "
            "else the field with --text_column"
        )


READERS = {
    "text": _text_documents,
    "json": _json_documents,
    "csv": _csv_documents,
    "parquet": _parquet_documents,
    "hub": _hub_documents,
    "arrow": arrow_documents,
    "datalayout": datalayout_documents,
    "megatron": megatron_documents,
    "ids": flat_documents,
}
