"""`datasets` goes through the shards of the input; each row is some documents, as texts or arrays of token ids.

One IterableDataset holds them all: its state_dict() says where a reader stands, its shard() gives a part its share.
"""

import glob
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow

from config.dataset_config import DatasetConfig
from mamba_fsdp.data.arrow_columns import column_of, named_errors, rows_of
from mamba_fsdp.data.corpus import Document, Shard, open_on_hub
from mamba_fsdp.data.importers.arrow import arrow_documents
from mamba_fsdp.data.importers.datalayout import datalayout_documents
from mamba_fsdp.data.importers.save_to_disk import check_all_count, open_saved_to_disk
from mamba_fsdp.errors import UserError, first_line

BLOCK = 1 << 20  # characters of a text that the tokenizer is given at once, and bytes read at once
ROWS = 64  # of a table at a time

datasets.disable_progress_bars()
datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what went wrong is said once, by us


@dataclass
class Batch:
    """Documents that follow each other and belong to one store."""

    documents: list[Document]
    store: str  # see Shard
    empty: int  # documents left out, as they hold nothing but white space
    position: dict[str, Any]  # where a reader resumes behind them


def read_batches(
    shards: list[Shard],
    options: DatasetConfig,
    size: int,
    part: tuple[int, int] = (0, 1),
    position: dict[str, Any] | None = None,
) -> Iterator[Batch]:
    """Yields batches of about `size` characters or tokens.

    part: (number, count) of the share to read: of the shards, or where these are too few each count-th document.
    position: of an earlier batch, to resume behind. Raises UserError, which names the file, for what can't be read.
    """
    how = {"shards": shards, "options": options}
    dataset = datasets.IterableDataset.from_generator(_rows, gen_kwargs=how)
    number, count = part
    if 1 < count <= dataset.num_shards:
        dataset = dataset.shard(count, number, contiguous=True)
        number = 0
        count = 1
    seen = 0  # documents that have ended, of this part and others
    if position:
        dataset.load_state_dict(position["dataset"])
        seen = position["documents"]
    batch = Batch([], "", 0, {})
    held = 0
    for row in dataset:
        if batch.position and (held >= size or row["store"] != batch.store):
            yield batch
            batch = Batch([], "", 0, {})
            held = 0
        for document in row["documents"]:
            is_ours = seen % count == number
            seen += document.ends
            if not is_ours:
                continue
            if document.begins and document.ends and _is_empty(document.content):
                batch.empty += 1
                continue
            batch.documents += _short_parts(document)
            held += len(document.content)
        batch.store = row["store"]
        batch.position = {"dataset": dataset.state_dict(), "documents": seen}
    if batch.position:
        yield batch


def _rows(shards: list[Shard], options: DatasetConfig) -> Iterator[dict]:
    for shard in shards:
        with named_errors(shard.name, shard.kind):
            for documents in READERS[shard.kind](shard, options):
                yield {"store": shard.store, "documents": documents}


def _is_empty(content):
    if isinstance(content, str):
        return not content or content.isspace()
    return len(content) == 0


def _short_parts(document):
    """A long text in parts: the tokenizer takes some hundred bytes of memory for each token of a call."""
    content = document.content
    if not isinstance(content, str):
        return [document]
    parts = []
    for start in range(0, len(content), BLOCK):
        end = start + BLOCK
        is_last = end >= len(content)
        begins = document.begins and start == 0
        parts.append(Document(content[start:end], begins, document.ends and is_last))
    return parts


# ---------------------------------------------------------------- tables


def _table_documents(shard, options):
    for table in _open(shard, options).with_format("arrow").iter(batch_size=ROWS):
        column = column_of(shard.name, table, options.text_column)
        check_all_count(shard.name, table)
        yield [Document(row) for row in rows_of(shard.name, column)]


def _open(shard, options):
    column = options.text_column
    if shard.kind == "save_to_disk":
        return open_saved_to_disk(shard.name, shard.split)
    if shard.kind == "hub":
        rows = open_on_hub(shard.name, options.config, shard.split)
        return rows.shard(shard.count, shard.number)
    how: dict[str, Any] = {}
    if shard.kind == "csv":  # each field is text as it stands there: no number, and NA is no gap
        how = {"usecols": [column], "converters": {column: str}, "keep_default_na": False}
    files = [glob.escape(shard.name)]
    return datasets.load_dataset(shard.kind, data_files=files, split="train", streaming=True, **how)


# ---------------------------------------------------------------- text and JSON lines

# `datasets` has builders for both. That for text reads a file whole, or cuts it at line breaks and changes these; that
# for JSON fails where a field beside the text is null in the first 10 MB and a text later, or has other fields there.


def _text_documents(shard, options):
    with _opened(shard.name) as file:
        if options.documents == "file":
            yield from _whole_file(file)
            return
        separator = _separator(options.documents)
        rest = ""
        while text := file.read(BLOCK):
            *documents, rest = separator.split(rest + text)
            yield [Document(document.strip("\r\n")) for document in documents]
        yield [Document(rest.strip("\r\n"))]


def _whole_file(file):
    begins = True
    is_last = False
    text = file.read(BLOCK)
    while not is_last:
        following = file.read(BLOCK)
        is_last = not following
        yield [Document(text, begins, is_last)]
        begins = False
        text = following


def _separator(documents):
    """What stands between documents of a text file."""
    kind, _, text = documents.partition(":")
    patterns = {
        "lines": r"\r?\n",
        "blank_line": r"(?:^|\n)(?:[ \t\r]*\n)+",
        "separator": re.escape(text),
    }
    return re.compile(patterns[kind])


def _json_documents(shard, options):
    with _opened(shard.name) as file:
        lines = file.readlines(BLOCK)
        if "".join(lines[:1]).lstrip().startswith("["):
            records = json.loads("".join(lines) + file.read())
            for number, record in enumerate(records, 1):
                where = f"{shard.name}: record {number}"
                yield [Document(_field(where, record, options.text_column))]
            return
        number = 0
        while lines:
            documents = []
            for line in lines:
                number += 1
                where = f"{shard.name}: record {number}"
                if line.strip():
                    record = _parsed(where, line)
                    documents.append(Document(_field(where, record, options.text_column)))
            yield documents
            lines = file.readlines(BLOCK)


def _opened(name):
    """The text of a file, unpacked."""
    file = open(name, "rb")  # by Python, for names that are no UTF-8
    compression = {".gz": "gzip", ".zst": "zstd"}.get(os.path.splitext(name)[1].lower())
    if compression:
        file = pyarrow.CompressedInputStream(file, compression)
    return io.TextIOWrapper(file, "utf-8-sig", newline="\n")


def _parsed(where, line):
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is no valid JSON ({first_line(error)})") from None


def _field(where, record, column):
    """What `column` names in a record: text, or token ids; "" for null. document.text is the field text of document."""
    value = record
    names = [column] if isinstance(record, dict) and column in record else column.split(".")
    for name in names:
        if value is None:
            break
        if not isinstance(value, dict) or name not in value:
            has = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise UserError(
                f"{where}: there is no {column!r} in it ({has}); name one with --text_column"
            )
        value = value[name]
    if value is None:
        return ""
    if isinstance(value, list) and all(type(token) is int for token in value):
        return np.array(value, dtype=np.int64)
    if not isinstance(value, str):
        raise UserError(f"{where}: {column!r} is {type(value).__name__}, not text or token ids")
    value.encode()  # JSON can spell half a character, which is an error here
    return value


READERS: dict[str, Callable[[Shard, DatasetConfig], Iterable[list]]] = {
    "text": _text_documents,
    "json": _json_documents,
    "csv": _table_documents,
    "parquet": _table_documents,
    "save_to_disk": _table_documents,
    "hub": _table_documents,
    "arrow": arrow_documents,
    "datalayout": datalayout_documents,
}
