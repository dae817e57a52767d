"""`datasets` goes through the shards of the input; each row is some documents, as texts or arrays of token ids.

One IterableDataset holds them all: its state_dict() says where a reader stands, its shard() gives a part its share.
"""

import codecs
import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow

from config.dataset_config import DatasetConfig
from mamba_fsdp.data.arrow_columns import column_of, named_errors, rows_of
from mamba_fsdp.data.corpus import Shard, open_on_hub
from mamba_fsdp.data.importers.arrow import arrow_documents
from mamba_fsdp.data.importers.datalayout import datalayout_documents
from mamba_fsdp.data.importers.save_to_disk import open_saved_to_disk
from mamba_fsdp.errors import UserError, first_line

BLOCK = 1 << 20  # characters of a text that the tokenizer is given at once, and bytes read at once
ROWS = 64  # of a table at a time
SEPARATOR_SPACE = 1 << 12  # characters at the end of what is read that may be a part of a separator
CONVERT = "iconv -f UTF-16 (or LATIN1) -t UTF-8 FILE > NEW converts other encodings"

datasets.disable_progress_bars()
datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what went wrong is said once, by us


class Document(NamedTuple):
    """A document, or a part of a long one."""

    content: str | np.ndarray  # text, or token ids (n,)
    ends: bool = True  # whether the document ends here


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
        number, count = 0, 1
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
        for content, ends in row["documents"]:
            is_ours = seen % count == number
            seen += ends
            if not is_ours:
                continue
            if ends and _is_empty(content):
                batch.empty += 1
                continue
            batch.documents += _short_parts(content, ends)
            held += len(content)
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


def _short_parts(content, ends):
    """A long text in parts: the tokenizer takes some hundred bytes of memory for each token of a call."""
    parts = []
    while isinstance(content, str) and len(content) > BLOCK:
        cut = _place_to_cut(content[:BLOCK])
        parts.append(Document(content[:cut], False))
        content = content[cut:]
    return [*parts, Document(content, ends)]


def _place_to_cut(text):
    """Where to cut a stretch of a long text: late, before a line break or a space if there is one."""
    for sign in ("\n", " "):
        cut = text.rfind(sign, len(text) * 7 // 8)
        if cut > 0:
            return cut
    return len(text)


# ---------------------------------------------------------------- tables


def _table_documents(shard, options):
    for table in _open(shard, options).with_format("arrow").iter(batch_size=ROWS):
        column = column_of(shard.name, table, options.text_column)
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
    for texts, ends in _cut(shard.name, _separator(options.documents)):
        *whole, last = texts
        yield [*map(Document, whole), Document(last, ends)]


def _json_documents(shard, options):
    if _is_list(shard.name):
        with _opened(shard.name) as file:
            records = json.loads(file.read())
        for number, record in enumerate(records, 1):
            where = f"{shard.name}: record {number}"
            yield [Document(_field(where, record, options.text_column))]
        return
    number = 1
    line = ""
    for texts, ends in _cut(shard.name, re.compile("\n")):
        texts[0] = line + texts[0]
        line = "" if ends else texts.pop()
        documents = []
        for text in texts:
            where = f"{shard.name}: record {number}"
            number += 1
            if text.strip():
                documents.append(Document(_field(where, _parsed(where, text), options.text_column)))
        yield documents


def _separator(documents):
    """What stands between documents of a text file; None where the file is one."""
    kind, _, text = documents.partition(":")
    patterns = {
        "lines": r"\r?\n",
        "blank_line": r"\n(?:[ \t\r]*\n)+",
        "separator": re.escape(text),
    }
    return re.compile(patterns[kind]) if kind in patterns else None


def _cut(name, separator):
    """Yields (texts that stand between separators, whether the last one ends) until the file ends. Line breaks beside a
    separator belong to it."""
    buffer = ""
    is_inside = (
        separator is None
    )  # the buffer's beginning is none of a document that a separator set off
    for text, is_last in _decoded(name):
        buffer += text
        texts = []
        start = 0
        for match in separator.finditer(buffer) if separator else ():
            if match.end() == len(buffer) and not is_last:
                break  # the separator may end behind it
            texts.append(_stripped(buffer[start : match.start()], not is_inside, True))
            is_inside = False
            start = match.end()
        buffer = buffer[start:]
        is_long = len(buffer) > BLOCK
        if is_last:
            texts.append(_stripped(buffer, not is_inside, separator is not None))
        elif is_long:
            cut = _place_to_cut(buffer[: len(buffer) - SEPARATOR_SPACE])
            texts.append(_stripped(buffer[:cut], not is_inside, False))
            buffer = buffer[cut:]
            is_inside = True
        if texts:
            yield texts, is_last or not is_long


def _stripped(text, at_begin, at_end):
    if at_begin:
        text = text.lstrip("\r\n")
    if at_end:
        text = text.rstrip("\r\n")
    return text


def _decoded(name):
    """Yields (a stretch of the file's text, whether it is the last). Raises UserError for what is no UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    done = 0
    with _opened(name) as file:
        is_last = False
        while not is_last:
            data = file.read(BLOCK)
            is_last = not data
            zeros = data.count(
                0, 0, 4096
            )  # UTF-16 has one in every other byte, which is valid UTF-8
            if data.startswith((b"\xff\xfe", b"\xfe\xff")) or 8 * zeros > len(data[:4096]):
                raise UserError(f"{name}: looks like UTF-16 or UTF-32; {CONVERT}")
            try:
                yield decoder.decode(data, final=is_last), is_last
            except UnicodeDecodeError as error:
                at = done + len(data) - len(error.object) + error.start
                raise UserError(f"{name}: invalid UTF-8 at byte {at}; {CONVERT}") from None
            done += len(data)


def _opened(name):
    """The bytes of a file, unpacked."""
    file = open(name, "rb")  # by Python, for names that are no UTF-8
    compression = {".gz": "gzip", ".zst": "zstd"}.get(os.path.splitext(name)[1].lower())
    return pyarrow.CompressedInputStream(file, compression) if compression else file


def _is_list(name):
    with _opened(name) as file:
        return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


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
