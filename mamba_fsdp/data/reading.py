"""Shards of the input become documents, as texts or arrays of token ids; `datasets` goes through tables."""

import csv
import glob
import io
import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import datasets
import numpy as np
import pyarrow

from mamba_fsdp.data.corpus import ARCHIVES, Document, Shard
from mamba_fsdp.data.importers import (
    arrow_documents,
    column_of,
    datalayout_documents,
    rows_of,
)
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.settings.dataset_config import DatasetConfig

BLOCK = 1 << 20  # characters of a text that the tokenizer is given at once, and bytes read at once
ROWS = 64  # of a table at a time
DELIMITERS = ",;\t|"  # of fields in CSV files
START = {"shard": 0, "row": 0, "documents": 0}  # a position: what has been read
SEPARATORS = {"lines": r"\r?\n", "blank_line": r"(?:^|\n)(?:[ \t\r]*\n)+"}  # of documents in text

csv.field_size_limit(sys.maxsize)  # a field may be a book
datasets.disable_progress_bars()
datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what went wrong is said once, by us
logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # each of its retries too


@dataclass
class Batch:
    """Documents that follow each other."""

    documents: list[Document] = field(default_factory=list)
    position: dict[str, int] = field(default_factory=dict)  # where a reader resumes behind them
    size: int = 0  # characters or tokens
    store: str = "train"  # where they go
    shards: int = 1  # that are read


def read_batches(
    shards: list[Shard],
    options: DatasetConfig,
    size: int,
    part: tuple[int, int] = (0, 1),
    position: dict[str, int] = START,
) -> Iterator[Batch]:
    """Yields batches of about `size` characters or tokens.

    part: (number, count) of the share to read: of the shards, or where these are too few each count-th document.
    position: of an earlier batch, to resume behind. Raises UserError, which names the file, for what can't be read.
    """
    number, count = part
    if 1 < count <= len(shards):
        mine = np.array_split(np.arange(len(shards)), count)[number]
        shards = [shards[index] for index in mine]
        number = 0
        count = 1
    resumed = (position["shard"], position["row"])
    seen = position["documents"]
    batch = Batch()
    for place, document in _documents(shards, options, position["shard"]):
        if place <= resumed:
            continue
        store = shards[place[0]].store
        if batch.size >= size or (batch.position and batch.store != store):
            yield batch
            batch = Batch()
        batch.store = store
        if seen % count == number:
            batch.documents += _short_parts(document)
            batch.size += len(document.content)
        if document.ends:
            seen += 1
        batch.position = {"shard": place[0], "row": place[1], "documents": seen}
        batch.shards = len(shards)
    if batch.position:
        yield batch


def _documents(shards, options, first):
    """Yields ((number of a shard, of a document or part of one in it), that) from a shard on."""
    for number, shard in enumerate(shards[first:], first):
        try:
            for row, document in enumerate(READERS[shard.kind](shard, options), 1):
                yield (number, row), document
        except Exception as error:  # the libraries raise whatever a file runs into
            reason = getattr(error, "strerror", None) or first_line(error)[:300]
            if isinstance(error, UnicodeDecodeError):
                reason = "its text is not UTF-8; convert it: iconv -f ISO-8859-1 -t UTF-8 FILE"
            raise UserError(f"{shard.name}: can't be read as {shard.kind} ({reason})") from error


def _short_parts(document):
    """A long text in parts: the tokenizer takes some hundred bytes of memory for each token of a call. Of nothing but
    white space nothing is left."""
    content = document.content
    if not isinstance(content, str):
        return [document]
    if document.begins and document.ends and content.isspace():
        return [Document("")]
    if len(content) <= BLOCK:
        return [document]
    pieces = [content[start : start + BLOCK] for start in range(0, len(content), BLOCK)]
    parts = [Document(piece, ends=False) for piece in pieces]
    parts[-1] = parts[-1]._replace(ends=document.ends)
    return parts


# ---------------------------------------------------------------- tables


def _table_documents(shard, options):
    for table in _open(shard, options).with_format("arrow").iter(batch_size=ROWS):
        yield from map(Document, rows_of(column_of(table, options.text_column)))


def _open(shard, options):
    if shard.kind == "hub":
        return datasets.load_dataset(
            shard.name, options.config or None, split=shard.split, streaming=True
        )
    files = [glob.escape(shard.name)]
    return datasets.load_dataset(shard.kind, data_files=files, split="train", streaming=True)


# ---------------------------------------------------------------- text, JSON lines and CSV

# `datasets` has builders for them. That for text reads a file whole, or cuts it at line breaks and changes these; that
# for JSON fails where a field beside the text is null in the first 10 MB and a text later, or has other fields there;
# that for CSV takes another column where the rows, but not the header, end with a comma.


def _text_documents(shard, options):
    with _opened(shard.name) as file:
        if options.documents == "file":
            yield from _whole_file(file)
            return
        kind, _, text = options.documents.partition(":")
        separator = re.compile(SEPARATORS.get(kind) or re.escape(text))
        rest = ""
        while text := file.read(BLOCK):
            *documents, rest = separator.split(rest + text)
            yield from [Document(document.strip("\r\n")) for document in documents]
        yield Document(rest.strip("\r\n"))


def _whole_file(file):
    begins = True
    text = file.read(BLOCK)
    while following := file.read(BLOCK):
        yield Document(text, begins, ends=False)
        begins = False
        text = following
    yield Document(text, begins)


def _json_documents(shard, options):
    with _opened(shard.name) as file:
        first = file.readline()
        if first.lstrip().startswith("["):  # one list of records, which is read whole
            for number, record in enumerate(_parsed("it", first + file.read()), 1):
                yield Document(_field(f"record {number}", record, options.text_column))
            return
        for number, line in enumerate(itertools.chain([first], file), 1):
            where = f"line {number}"
            if line.strip():
                yield Document(_field(where, _parsed(where, line), options.text_column))


def _csv_documents(shard, options):
    """Each field is text as it stands there. Lines may end with CR alone."""
    with _opened(shard.name, newline="") as file:
        first = file.readline()
        delimiter = max(DELIMITERS, key=first.count)
        lines = itertools.chain([first], file)
        rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
        try:
            for row in rows:
                where = f"line {rows.line_num}"
                if any(row.pop(None, [])):
                    raise ValueError(
                        f"{where} has more fields than the header; put one that holds {delimiter!r} in quotes"
                    )
                yield Document(_field(where, row, options.text_column))
        except csv.Error as error:
            raise ValueError(
                f"behind line {rows.line_num}: {error}; a quote within a field is written twice"
            ) from None


def _opened(name, newline="\n"):
    """The text of a file, unpacked."""
    file = open(name, "rb")  # by Python, for names that are no UTF-8
    compression = ARCHIVES.get(os.path.splitext(name)[1].lower())
    if compression:
        file = pyarrow.CompressedInputStream(file, compression)
    return io.TextIOWrapper(file, "utf-8-sig", newline=newline)


def _parsed(where, line):
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {first_line(error)}") from None


def _field(where, record, column):
    """What `column` names in a record: text, or token ids; "" for null. document.text is the field text of document."""
    value = record
    fields = record if isinstance(record, dict) else {}
    names = [column] if column in fields else column.split(".")
    for name in names:
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif value is not None:
            raise ValueError(
                f"{where} has no {column!r}; it has: {', '.join(fields)}; name one with --text_column"
            )
    if value is None:
        return ""
    if isinstance(value, list) and all(type(token) is int for token in value):
        return np.array(value, dtype=np.int64)
    if not isinstance(value, str):
        raise ValueError(f"{where}: {column!r} is {type(value).__name__}, not text or token ids")
    value.encode()  # JSON can spell half a character, which is an error here
    return value


READERS: dict[str, Callable[[Shard, DatasetConfig], Iterator[Document]]] = {
    "text": _text_documents,
    "json": _json_documents,
    "csv": _csv_documents,
    "parquet": _table_documents,
    "hub": _table_documents,
    "arrow": arrow_documents,
    "datalayout": datalayout_documents,
}
