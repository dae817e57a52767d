"""Text input of every kind, read as blocks: cut cheaply and in order by one process, for many to turn into documents.

A source has `describe()` (what it is, to notice a change), `unit_count`, `blocks(position, unit)` (a unit's from a
position on), `sample(limit)`, `total`, `unit_size` and `measure` (for the progress bar), `most_documents` (None where
that takes reading) and `left_out` (names of files that are not read). A unit is the whole documents that one process
works on at a time; which, depends on the input only. A block is about BLOCK_BYTES long whatever the input's size, and
says where reading resumes after it. What a document is: documents.py.
"""

import bisect
import contextlib
import glob
import hashlib
import itertools
import json
import math
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import zstandard

from config.dataset_config import DatasetConfig
from mamba_fsdp.data.documents import (
    BYTE_ORDER_MARK,
    TextBlock,
    check_column,
    field_of,
    refuse_wide_characters,
    separator_of,
)
from mamba_fsdp.data.hub import why_offline
from mamba_fsdp.data.json_files import array_blocks
from mamba_fsdp.data.tables import ARRAYS, ROWS, places_to_cut, values
from mamba_fsdp.errors import UserError, first_line

UNIT_BYTES = 1 << 30  # of the input, all files end to end; about a shard of tokens
UNIT_ROWS = 1 << 20  # of a datasets name
BLOCK_BYTES = 1 << 19
READ_BYTES = 1 << 16
KINDS = {".txt": "text", ".text": "text", ".md": "text", ".jsonl": "json", ".ndjson": "json", ".json": "json",
         ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
ARCHIVES = {".gz": lambda: zlib.decompressobj(31), ".zst": lambda: zstandard.ZstdDecompressor().decompressobj()}
LINE_BREAK = re.compile(b"\n")
NO_CORPUS = {"site-packages", "dist-packages", "__pycache__"}  # folders of the standard library's that are not its own
# Cuts that don't change what a byte-level tokenizer makes of a long document: after a line break, else before a blank.
GOOD_CUTS = (re.compile(rb"(?<=\S\n)(?=\S)"), re.compile(rb"(?<=\S)(?= \S)"))


def open_source(name: str, options: DatasetConfig) -> "Files | Rows":
    """The source that INPUT names: local files, else what `datasets` loads. Raises UserError where nothing is found."""
    path = os.path.expanduser(name)
    if name == "builtin" or os.path.lexists(path) or glob.has_magic(path):
        if options.config or options.streaming:
            raise UserError(f"{name}: --config and --streaming are for `datasets` names, and this is a local path")
        return Files(*find_files(path, options.format, options.split), options=options)
    if _looks_local(name):
        raise UserError(f"{name}: no such file or folder")
    return Rows(name, options)


def find_files(name: str, format: str, split: str) -> tuple[list[tuple[str, str]], list[str]]:
    """(the files of a path, a glob or builtin, in order, each (path, kind); the names of those in folders whose kind is
    unknown). Raises UserError where there are none to read."""
    if name == "builtin":
        places, format = corpus_files(), "text"
    elif glob.has_magic(name) and not os.path.exists(name):
        places = [Path(place) for place in sorted(glob.glob(name, recursive=True))]
    else:
        places = [Path(name)]
    if not places:
        raise UserError(f"{name}: no file matches this pattern")
    found, left_out, used_split = [], [], False
    for place in places:
        if place.is_dir():
            files, had_split = _walk(place, format, split)
            found += [(path, kind) for path, kind in files if kind]
            left_out += [path.name for path, kind in files if not kind]
            used_split |= had_split
        elif kind := _kind(place, format):
            found.append((place, kind))
        else:
            raise UserError(f"{place}: can't tell its format by its name; add --format=text (or json, parquet, arrow)")
    if not found:
        raise UserError(f"{name}: no file named {', '.join(KINDS)} in it; --format=text takes every file as text")
    if split and not used_split:
        raise UserError(f"--split={split}: {name} has no splits; leave --split out")
    return [(str(path.absolute()), kind) for path, kind in found], left_out


def corpus_files() -> list[Path]:
    """The UTF-8 .py files of the running interpreter's library, sorted. Raises UserError where it has no sources."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
             if not NO_CORPUS.intersection(path.relative_to(root).parts) and _is_utf8(path)]
    if not files:
        raise UserError(f"{root}: this Python comes without its library's source files; name another INPUT")
    return files


def _is_utf8(path):
    """Some of Python's own tests are written in other encodings, or broken on purpose."""
    try:
        return path.read_bytes().decode() is not None
    except UnicodeDecodeError:
        return False


def _walk(folder, format, split):
    """([(path, kind or None)], whether --split chose among them) of a folder, its folders included, hidden ones not."""
    found, used_split = [], False
    for here, folders, names in os.walk(folder, onerror=_refuse):
        here = Path(here)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if "dataset_dict.json" in names:  # save_to_disk of several splits
            splits = _read_state(here / "dataset_dict.json", "splits")
            folders[:], used_split = (split or "train").split("+"), True
            if missing := [name for name in folders if name not in splits]:
                raise UserError(f"{here}: no split {missing[0]!r}; name one of {', '.join(splits)} with --split")
        elif "state.json" in names and "dataset_info.json" in names:  # save_to_disk: the state names its files
            found += [(here / file["filename"], "arrow") for file in _read_state(here / "state.json", "_data_files")]
            folders[:] = []
        else:
            found += [(here / name, _kind(here / name, format)) for name in sorted(names) if not name.startswith(".")]
    return found, used_split


def _read_state(path, key):
    try:
        return json.loads(path.read_bytes())[key]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: broken, or no save_to_disk folder's ({error})") from error


def _refuse(error):
    raise UserError(f"{error.filename}: can't be read ({error.strerror})") from error


def _kind(path, format):
    if format != "auto":
        return format
    name = path.name.lower()
    for suffix in ARCHIVES:
        name = name.removesuffix(suffix)
    kind = KINDS.get(os.path.splitext(name)[1])
    return None if kind in ("parquet", "arrow") and path.suffix in ARCHIVES else kind


def _looks_local(name):
    return (name.startswith((".", "/", "~")) or name.count("/") > 1
            or any(name.lower().removesuffix(archive).endswith(tuple(KINDS)) for archive in ("", *ARCHIVES)))


class Files:
    """Files on disk, one after the other."""

    measure = "B"

    def __init__(self, files: list[tuple[str, str]], left_out: list[str], options: DatasetConfig):
        self.files, self.left_out, self.options = files, left_out, options  # files: (path, kind)
        whole = options.documents == "file" and all(kind == "text" for _, kind in files)
        self.most_documents = len(files) if whole else None
        self._sizes = [stat.st_size for stat in self._stat()]
        *self._begins, self.total = itertools.accumulate(self._sizes, initial=0)
        self.unit_size, self.unit_count = UNIT_BYTES, max(1, math.ceil(self.total / UNIT_BYTES))

    def _stat(self):
        try:
            return [os.stat(path) for path, _ in self.files]
        except OSError as error:
            _refuse(error)

    def describe(self) -> dict:
        """What the files are at this moment, by their names, sizes and times."""
        digest = hashlib.sha256()
        for (path, kind), stat in zip(self.files, self._stat()):
            digest.update(f"{path}\0{kind}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return {"files": len(self.files), "first": self.files[0][0], "bytes": self.total, "digest": digest.hexdigest()}

    def blocks(self, position: dict | None = None, unit: int = 0) -> Iterator[TextBlock]:
        for number, start, end in self._parts(unit):
            if position and number == position["file"]:
                start = position["inner"]
            if not position or number >= position["file"]:
                for block in self._read(number, start, end):
                    yield block._replace(position={"file": number, "inner": block.position},
                                         done=self._begins[number] + min(block.done, 1) * self._sizes[number])

    def _parts(self, unit):
        """(a file's number, position of its first block, and of the one behind its last: None for its two ends) of the
        files in a unit: of the documents that begin in its UNIT_BYTES, of row groups, or of files that can't be cut."""
        low = unit * self.unit_size
        high = low + self.unit_size if unit + 1 < self.unit_count else self.total + 1
        first = bisect.bisect_left(self._begins, low)
        for number in range(max(0, first - 1), bisect.bisect_left(self._begins, high)):
            begin, size = self._begins[number], self._sizes[number]
            start = self._cut(number, low - begin, min(high - begin, size)) if begin < low < begin + size else None
            if start or number >= first:
                yield number, start, self._cut(number, high - begin, size) if high - begin < size else None

    def _cut(self, number, low, high):
        """Where the first document begins whose separator does in bytes [low, high) of a file; None for none."""
        path, kind = self.files[number]
        separator = LINE_BREAK if kind == "json" else separator_of(self.options) if kind == "text" else None
        with _named_errors(path, kind):
            if kind in ("parquet", "arrow"):
                places = ((row, share * self._sizes[number])
                          for row, share in places_to_cut(path, kind, self.options.text_column))
                return next(({"row": row} if at < high else None for row, at in places if at >= low), None)
            whole = not separator or os.path.splitext(path)[1].lower() in ARCHIVES
            if whole or kind == "json" and _is_array(_beginning(path)):
                return None
            offset = _next_document(path, separator, low, high)
        return {"offset": offset, **({"since": offset} if kind == "json" else {})} if offset else None

    def sample(self, limit: int) -> Iterator[TextBlock]:
        """Blocks from the whole breadth of the input, about `limit` bytes of it."""
        count, share = len(self.files), limit
        if self.total > limit:
            count = max(1, min(count, limit // min(BLOCK_BYTES, self.total // count + 1)))
            share = limit // count
        for number in range(count):
            yield from _take(self._read(number * len(self.files) // count), share)

    def _read(self, number, position=None, end=None):
        path, kind = self.files[number]
        position, end = position or {}, end or {}
        with _named_errors(path, kind):
            if kind == "text":
                yield from _read_text(path, separator_of(self.options), end.get("offset"), **position)
            elif kind == "json":
                yield from _read_json(path, end.get("offset"), **position)
            else:
                yield from _read_table(path, kind, self.options.text_column, end.get("row"), **position)


class Rows:
    """What `datasets.load_dataset` gives for a name: a table, or a stream."""

    measure = " rows"
    left_out = ()

    def __init__(self, name: str, options: DatasetConfig):
        offline = why_offline()
        import datasets  # a second to import: only where needed

        self.name, self.options = name, options
        config, split, streaming = options.config or None, options.split or "train", options.streaming
        try:
            self._rows = datasets.load_dataset(name, config, split=split, streaming=streaming)
        except Exception as error:  # the name, split or config is unknown, there is no network, ...
            reason = first_line(error) + (f"; no network: {offline}" if offline else "")
            raise UserError(f"{name}: no local path, and `datasets` can't load it ({reason})") from error
        self.total = self.most_documents = None if streaming else len(self._rows)
        self.unit_size = 0 if streaming else UNIT_ROWS  # a stream's units are its shards
        self.unit_count = max(1, self._rows.num_shards if streaming else math.ceil(len(self._rows) / UNIT_ROWS))
        self._description = {"dataset": name, "config": config, "split": split, "streaming": streaming,
                             "fingerprint": None if streaming else self._rows._fingerprint}
        names = self._rows.column_names or [options.text_column]
        self._column = options.text_column if options.text_column in names else options.text_column.split(".")[0]
        if self._rows.column_names:  # a stream may not know them before its first row
            check_column(name, self._column, self._rows.column_names)

    def describe(self) -> dict:
        return self._description

    def blocks(self, position: dict | None = None, unit: int = 0) -> Iterator[TextBlock]:
        row, column = position["row"] if position else unit * self.unit_size, self._column
        if self.total is None:
            rest = (self._rows.shard(self.unit_count, unit) if self.unit_count > 1 else self._rows).skip(row)
        else:
            end = min((unit + 1) * self.unit_size, self.total)
            rest = self._rows.select(range(row, end)).select_columns([column])
        for batch in rest.iter(batch_size=ROWS):
            check_column(self.name, column, batch)
            data, first = list(batch[column]), row + 1
            if column != self.options.text_column:
                data = [field_of(f"{self.name}: record {number}", self.options.text_column, {column: value})
                        for number, value in enumerate(data, first)]
            row += len(data)
            yield TextBlock(self.name, "rows", data, {"row": row}, row, first)

    def sample(self, limit: int) -> Iterator[TextBlock]:
        return _take((block for unit in range(self.unit_count) for block in self.blocks(unit=unit)), limit)


def _take(blocks, limit):
    """The first blocks that hold `limit` bytes together."""
    for block in blocks:
        yield block
        limit -= block.size()
        if limit <= 0:
            break


# ---------------------------------------------------------------- readers: a file to blocks; `done` is its share

def _stretches(path, offset=0, end=None):
    """Yields (bytes from `offset` on, decompressed; share of the file read); an archive has no `end`. Raises UserError
    for a broken archive."""
    make = ARCHIVES.get(os.path.splitext(path)[1].lower())
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        if not make:
            file.seek(offset)
            while stretch := file.read(min(BLOCK_BYTES, max(0, (end or size) - file.tell()))):
                yield stretch, file.tell() / size
            return
        archive = make()
        while stretch := file.read(READ_BYTES):
            while stretch:
                if archive.eof:  # several archives in one file
                    archive = make()
                try:
                    data = archive.decompress(stretch)
                except Exception as error:  # zlib and zstandard each have their own
                    raise UserError(f"{path}: a broken archive near byte {file.tell()} ({error})") from error
                skipped = min(offset, len(data))
                offset -= skipped
                yield data[skipped:], file.tell() / size
                stretch = archive.unused_data if archive.eof else b""
        if not archive.eof:
            raise UserError(f"{path}: the archive ends before its end; it is truncated: copy it again")


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


def cut_words(window):
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


def _beginning(path):
    return next((data for data, _ in _stretches(path) if data.strip()), b"")


def _is_array(beginning):
    return beginning.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")


def _read_json(path, end=None, offset=0, record=1, since=0, array=False):
    beginning = b"" if offset else _beginning(path)
    if array or _is_array(beginning):
        refuse_wide_characters(path, beginning)
        yield from array_blocks(path, _stretches(path, offset), BLOCK_BYTES, offset, record)
        return
    for data, _, done in _cut(path, offset, end, _cut_lines):
        if data:
            position = {"offset": offset + len(data), "record": record + data.count(b"\n"), "since": since}
            yield TextBlock(path, "json", data, position, done, record, offset, since=since)
            offset, record, _ = position.values()


def _cut_lines(buffer):
    return buffer.rfind(b"\n", 0, BLOCK_BYTES) + 1 or buffer.find(b"\n", BLOCK_BYTES) + 1, False


def _read_table(path, kind, column, end=None, row=0):
    if kind == "csv":
        refuse_wide_characters(path, next(_stretches(path), (b"", 0))[0])
    for before, array, done in ARRAYS[kind](path, column, row):
        array = array if end is None else array[:max(0, end - before)]
        for start in range(max(0, row - before), len(array), ROWS):
            data, first = values(path, column, row + 1, array[start:start + ROWS]), row + 1
            row += len(data)
            yield TextBlock(path, "rows", data, {"row": row}, done, first)
        if row == end:
            break


@contextlib.contextmanager
def _named_errors(path, kind):
    broken: tuple = ()
    if kind in ARRAYS:
        import pyarrow

        broken = (pyarrow.ArrowException,)
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror or error})") from error
    except broken as error:
        raise UserError(f"{path}: broken, or no {kind} file ({first_line(error)})") from error
