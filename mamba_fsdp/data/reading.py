"""`datasets` reads a piece of the input; its rows become documents: texts, or arrays of token ids.

Plain text, JSON lines and others' tokens come through IterableDataset.from_generator from the generators here and in
importers/, CSV, parquet and what lies on the Hub through load_dataset, all of them streaming. Where a reader stands is
what IterableDataset.state_dict says, taken between two batches.
"""

import codecs
import functools
import glob
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow

from config.dataset_config import DatasetConfig
from mamba_fsdp.data import importers
from mamba_fsdp.data.arrow_columns import column_of, named_errors, rows_of
from mamba_fsdp.data.corpus import Piece
from mamba_fsdp.data.hub import why_offline
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
    """Documents that follow each other."""

    documents: list[Document]
    empty: int  # documents left out, as they hold nothing but white space
    position: dict[str, Any]  # where a reader resumes behind them


class Reader:
    """One process's share of a piece, as batches of documents."""

    def __init__(
        self,
        piece: Piece,
        options: DatasetConfig,
        position: dict | None = None,
        stripe: bool = False,
    ) -> None:
        """position: of an earlier reader's batch. stripe: take each n-th document, or shard, as options.part says."""
        self.piece = piece
        self.options = options
        self.part, self.parts = 0, 1
        if stripe:
            self.part, self.parts = options.part_of()
        self.position = position or {"dataset": None, "documents": 0}

    def batches(self, size: int) -> Iterator[Batch]:
        """Yields batches of about `size` characters or tokens. Raises UserError, which names the file, for what can't
        be read."""
        number = self.position["documents"]
        documents: list[Document] = []
        empty = held = 0
        dataset = None
        for dataset, rows in self._rows():
            for document in rows:
                is_ours = number % self.parts == self.part
                number += document.ends
                if not is_ours:
                    continue
                if document.ends and _is_empty(document.content):
                    empty += 1
                    continue
                documents += _short_parts(document)
                held += len(document.content)
            if held >= size:
                yield Batch(documents, empty, _position(dataset, number))
                documents = []
                empty = held = 0
        if documents or empty:
            yield Batch(documents, empty, _position(dataset, number))

    def _rows(self):
        """Yields (the dataset, the documents of its next rows)."""
        with named_errors(self.piece.names[0], self.piece.kind):
            dataset = _open(self.piece, self.options)
            if self.parts > 1 and dataset.num_shards >= self.parts:
                dataset = dataset.shard(self.parts, self.part, contiguous=True)
                self.part, self.parts = 0, 1
            if self.position["dataset"]:
                dataset.load_state_dict(self.position["dataset"])
            if self.piece.kind in importers.GENERATORS or self.piece.kind in GENERATORS:
                for row in dataset:
                    yield dataset, itertools.starmap(Document, row["documents"])
                return
            first = 1
            for table in dataset.with_format("arrow").iter(batch_size=ROWS):
                where = f"{self.piece.names[0]}: record {first}"
                column = column_of(self.piece.names[0], table, self.options.text_column)
                yield dataset, map(Document, rows_of(where, column))
                first += len(table)


def _position(dataset, documents):
    return {"dataset": dataset.state_dict(), "documents": documents}


def _is_empty(content):
    if isinstance(content, str):
        return not content or content.isspace()
    return len(content) == 0


def _short_parts(document):
    """A long text in parts: the tokenizer takes some hundred bytes of memory for each token of a call."""
    text = document.content
    if not isinstance(text, str) or len(text) <= BLOCK:
        return [document]
    parts = []
    while len(text) > BLOCK:
        cut = _place_to_cut(text[:BLOCK])
        parts.append(Document(text[:cut], False))
        text = text[cut:]
    return [*parts, Document(text, document.ends)]


def _place_to_cut(text):
    """Where to cut a stretch of a long text: late, before a line break or a space if there is one."""
    for sign in ("\n", " "):
        cut = text.rfind(sign, len(text) * 7 // 8)
        if cut > 0:
            return cut
    return len(text)


def _open(piece: Piece, options: DatasetConfig) -> datasets.IterableDataset:
    if piece.kind == "save_to_disk":
        return importers.open_saved_to_disk(piece.names[0], piece.split, options.text_column)
    if piece.kind == "hub":
        return ask_datasets(
            "load_dataset",
            piece.names[0],
            options.config or None,
            split=piece.split,
            streaming=True,
        )
    generator = importers.GENERATORS.get(piece.kind) or GENERATORS.get(piece.kind)
    if generator:
        files = {"files": piece.names, "options": options}
        return datasets.IterableDataset.from_generator(generator, gen_kwargs=files)
    return _open_table(piece.kind, piece.names[0], options.text_column)


def _open_table(kind, name, column):
    load = functools.partial(
        datasets.load_dataset, kind, data_files=[glob.escape(name)], split="train", streaming=True
    )
    if kind == "csv":  # each field is text as it stands there: no number, and NA is no gap
        return load(usecols=[column], converters={column: str}, keep_default_na=False)
    dataset = load()
    top = column.partition(".")[0]
    if kind == "parquet" and dataset.column_names and top in dataset.column_names:
        return load(columns=[top])
    return dataset


def ask_datasets(function: str, name: str, *arguments: Any, **more: Any) -> Any:
    """Calls a function of `datasets` about a name on the Hub. Raises UserError where it can't answer."""
    offline = why_offline()
    try:
        return getattr(datasets, function)(name, *arguments, **more)
    except Exception as error:  # the name, split or config is unknown, there is no network, ...
        reason = first_line(error)
        if offline:
            reason += f"; no network: {offline}"
        raise UserError(
            f"{name}: no local path, and `datasets` can't load it ({reason})"
        ) from error


# ---------------------------------------------------------------- text and JSON lines

# `datasets` has builders for both. That for text reads whole files, or cuts them at line breaks, which it changes; that
# for JSON fails where a field beside the text is null in the first 10 MB and a text later, or has other fields there.


def text_rows(files: list[str], options: DatasetConfig) -> Iterator[dict]:
    """Yields {"documents": [(text, whether the document ends), ...]} of plain text, in the memory of some blocks."""
    for name in files:
        for texts, ends in _cut(name, _separator(options.documents)):
            yield {"documents": [(text, True) for text in texts[:-1]] + [(texts[-1], ends)]}


def json_rows(files: list[str], options: DatasetConfig) -> Iterator[dict]:
    """Yields the same of JSON lines, and of JSON files that are one list."""
    for name in files:
        if _is_list(name):
            yield from _list_rows(name, options.text_column)
            continue
        record = 1
        line = ""
        for texts, ends in _cut(name, re.compile("\n")):
            texts[0] = line + texts[0]
            line = ""
            if not ends:
                line = texts.pop()
            documents = []
            for text in texts:
                if text.strip():
                    where = f"{name}: record {record}"
                    documents.append(
                        (_field(where, _parsed(where, text), options.text_column), True)
                    )
                record += 1
            yield {"documents": documents}


GENERATORS = {"text": text_rows, "json": json_rows}


def _separator(documents):
    """What stands between documents of a text file; None where the file is one."""
    kind, _, text = documents.partition(":")
    if kind == "lines":
        return re.compile(r"\r?\n")
    if kind == "blank_line":
        return re.compile(r"\n(?:[ \t\r]*\n)+")
    if kind == "separator":
        return re.compile(re.escape(text))
    return None


def _cut(name, separator):
    """Yields (texts that stand between separators, whether the last one ends) until the file ends. Line breaks beside a
    separator belong to it."""
    buffer = ""
    is_inside = False  # buffer begins in a document whose beginning was yielded
    for text, is_last in _decoded(name):
        buffer += text
        texts = []
        start = 0
        if separator:
            for match in separator.finditer(buffer):
                if match.end() == len(buffer) and not is_last:
                    break  # the separator may end behind it
                texts.append(_stripped(buffer[start : match.start()], not is_inside, True))
                is_inside = False
                start = match.end()
        buffer = buffer[start:]
        ends = True
        if is_last:
            if buffer or is_inside:
                texts.append(_stripped(buffer, separator and not is_inside, separator))
        elif len(buffer) > BLOCK:
            cut = _place_to_cut(buffer[: len(buffer) - SEPARATOR_SPACE])
            texts.append(_stripped(buffer[:cut], separator and not is_inside, False))
            buffer = buffer[cut:]
            ends = False
            is_inside = True
        if texts:
            yield texts, ends


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
    with named_errors(name, "text"), pyarrow.input_stream(name) as file:  # unpacks .gz and .zst
        while True:
            data = file.read(BLOCK)
            if done == 0:
                _check_no_utf16(name, data)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                kept = len(error.object) - len(data)
                raise UserError(
                    f"{name}: invalid UTF-8 at byte {done - kept + error.start}; {CONVERT}"
                ) from None
            done += len(data)
            yield text, not data
            if not data:
                return


def _check_no_utf16(name, data):
    zeros = data.count(0, 0, 4096)  # UTF-16 has one in every other byte, which is valid UTF-8
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or 8 * zeros > len(data[:4096]):
        raise UserError(f"{name}: looks like UTF-16 or UTF-32; {CONVERT}")


def _is_list(name):
    with named_errors(name, "JSON"), pyarrow.input_stream(name) as file:
        return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _list_rows(name, column):
    """Of a JSON file that is one list: `datasets` reads it whole."""
    record = 1
    for table in _open_table("json", name, column).with_format("arrow").iter(batch_size=ROWS):
        where = f"{name}: record {record}"
        yield {"documents": [(row, True) for row in rows_of(where, column_of(name, table, column))]}
        record += len(table)


def _parsed(where, line):
    try:
        return json.loads(line)
    except RecursionError:
        raise UserError(f"{where} is no valid JSON (nested too deeply)") from None
    except ValueError as error:
        raise UserError(f"{where} is no valid JSON ({error})") from None


def _field(where, record, column):
    """What `column` names in a record: text, token ids, or "" for null. document.text is the field text of document."""
    value = record
    rest = column
    while rest:
        if not isinstance(value, dict):
            raise UserError(f"{where} is {type(value).__name__}, not an object with {rest!r} in it")
        name, _, behind = rest.partition(".")
        if rest in value:
            name, behind = rest, ""
        if name not in value:
            raise UserError(
                f"{where}: there is no field {column!r}; it has: {', '.join(map(str, value))}; name one "
                "with --text_column"
            )
        value = value[name]
        rest = behind
        if value is None:
            return ""
    if isinstance(value, list) and all(type(token) is int for token in value):
        return np.array(value, dtype=np.int64)
    if not isinstance(value, str):
        raise UserError(
            f"{where}: {column!r} is {type(value).__name__}, not text or token ids; name another with "
            "--text_column"
        )
    if not value.isascii():
        _check_whole_characters(where, value)
    return value


def _check_whole_characters(where, text):
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half a character
        raise UserError(f"{where} holds half a character (a lone surrogate)") from None
