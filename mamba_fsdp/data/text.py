"""Sources of text: files, or what `datasets` loads, for readers.py to read as blocks.

A source has `describe()` (what it is, to notice a change), `unit_count`, `blocks(position, unit)` (a unit's from a
position on), `sample(limit)`, `total`, `unit_size` and `measure` (for the progress bar) and `left_out` (names of files
that are not read). A unit is the whole documents that one process works on at a time; which, depends on the input only.
What a document is: documents.py.
"""

import bisect
import glob
import hashlib
import itertools
import json
import math
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from config.dataset_config import DatasetConfig
from mamba_fsdp.data.documents import TextBlock
from mamba_fsdp.data.hub import why_offline
from mamba_fsdp.data.readers import ARCHIVES, BLOCK_BYTES, ROWS, place_to_cut, read_blocks, table_blocks
from mamba_fsdp.errors import UserError, first_line

UNIT_BYTES = 1 << 30  # of the input, all files end to end; about a shard of tokens
UNIT_ROWS = 1 << 20  # of a datasets name
KINDS = {".txt": "text", ".text": "text", ".md": "text", ".jsonl": "json", ".ndjson": "json", ".json": "json",
         ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
NO_CORPUS = {"site-packages", "dist-packages", "__pycache__"}  # folders of the standard library's that are not its own
SPLITS = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}


def open_source(name: str, options: DatasetConfig) -> "TextSource":
    """The source that INPUT names: local files, else what `datasets` loads. Raises UserError where nothing is found."""
    path = os.path.expanduser(name)
    local = name == "builtin" or os.path.lexists(path) or glob.has_magic(path)
    if local and (options.config or options.streaming):
        raise UserError(f"{name}: --config and --streaming are for `datasets` names, and this is a local path")
    if not local and _looks_local(name):
        raise UserError(f"{name}: no such file or folder")
    if options.splits == "official":
        return Splits(_local_splits(name, path, options) if local else _splits_of_name(name, options), options)
    return Files(*find_files(path, options.format, options.split), options=options) if local else Rows(name, options)


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
    if split and not any(True for place in places for _ in place.rglob("dataset_dict.json")):
        raise UserError(f"--split={split}: {name} has no splits; leave --split out")
    found, left_out = [], []
    for place in places:
        if place.is_dir():
            files = list(_walk(place, format, split))
            found += [(path, kind) for path, kind in files if kind]
            left_out += [path.name for path, kind in files if not kind]
        elif kind := _kind(place, format):
            found.append((place, kind))
        else:
            raise UserError(f"{place}: can't tell its format by its name; add --format=text (or json, parquet, arrow)")
    if not found:
        raise UserError(f"{name}: no file named {', '.join(KINDS)} in it; --format=text takes every file as text")
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
    """(path, kind or None) of each file of a folder, its folders included, hidden ones not."""
    for here, folders, names in os.walk(folder, onerror=_refuse):
        here = Path(here)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if "dataset_dict.json" in names:  # save_to_disk of several splits
            splits = _read_state(here / "dataset_dict.json", "splits")
            folders[:] = (split or "train").split("+")
            if missing := [name for name in folders if name not in splits]:
                raise UserError(f"{here}: no split {missing[0]!r}; name one of {', '.join(splits)} with --split")
        elif "state.json" in names and "dataset_info.json" in names:  # save_to_disk: the state names its files
            yield from ((here / file["filename"], "arrow") for file in _read_state(here / "state.json", "_data_files"))
            folders[:] = []
        else:
            yield from ((here / name, _kind(here / name, format)) for name in sorted(names) if name[0] != ".")


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
            path, kind = self.files[number]
            if position and number == position["file"]:
                start = position["inner"]
            if not position or number >= position["file"]:
                for block in read_blocks(path, kind, self.options, start, end):
                    yield block._replace(position={"file": number, "inner": block.position},
                                         done=self._begins[number] + min(block.done, 1) * self._sizes[number])

    def _parts(self, unit):
        """(a file's number, position of its first block, and of the one behind its last: None for its two ends) of the
        files in a unit: of the documents that begin in its UNIT_BYTES, of row groups, or of files that can't be cut."""
        low = unit * self.unit_size
        high = low + self.unit_size if unit + 1 < self.unit_count else self.total + 1
        first = bisect.bisect_left(self._begins, low)

        def cut(number, low, high):
            return place_to_cut(*self.files[number], self.options, low, high)

        for number in range(max(0, first - 1), bisect.bisect_left(self._begins, high)):
            begin, size = self._begins[number], self._sizes[number]
            start = cut(number, low - begin, min(high - begin, size)) if begin < low < begin + size else None
            if start or number >= first:
                yield number, start, cut(number, high - begin, size) if high - begin < size else None

    def sample(self, limit: int) -> Iterator[TextBlock]:
        """Blocks from the whole breadth of the input, about `limit` bytes of it."""
        count, share = len(self.files), limit
        if self.total > limit:
            count = max(1, min(count, limit // min(BLOCK_BYTES, self.total // count + 1)))
            share = limit // count
        for number in range(count):
            yield from _take(read_blocks(*self.files[number * len(self.files) // count], self.options), share)


class Rows:
    """What `datasets.load_dataset` gives for a name: a table, or a stream."""

    measure = " rows"
    left_out = ()

    def __init__(self, name: str, options: DatasetConfig):
        self.name, self.options = name, options
        config, split, streaming = options.config or None, options.split or "train", options.streaming
        self._rows = _ask_datasets("load_dataset", name, config, split=split, streaming=streaming)
        self.total = None if streaming else len(self._rows)
        self.unit_size = 0 if streaming else UNIT_ROWS  # a stream's units are its shards
        self.unit_count = max(1, self._rows.num_shards if streaming else math.ceil(len(self._rows) / UNIT_ROWS))
        self._description = {"dataset": name, "config": config, "split": split, "streaming": streaming,
                             "fingerprint": None if streaming else self._rows._fingerprint}

    def describe(self) -> dict:
        return self._description

    def blocks(self, position: dict | None = None, unit: int = 0) -> Iterator[TextBlock]:
        row = position["row"] if position else unit * self.unit_size
        if self.total is None:
            rest = (self._rows.shard(self.unit_count, unit) if self.unit_count > 1 else self._rows).skip(row)
        else:
            rest = self._rows.select(range(row, min((unit + 1) * self.unit_size, self.total)))

        def batches(before):
            for batch in rest.with_format("arrow").iter(batch_size=ROWS):
                yield before, batch, before + len(batch)
                before += len(batch)

        return table_blocks(self.name, self.options.text_column, batches(row), row)

    def sample(self, limit: int) -> Iterator[TextBlock]:
        return _take((block for unit in range(self.unit_count) for block in self.blocks(unit=unit)), limit)


def _ask_datasets(function, name, *arguments, **more):
    offline = why_offline()
    import datasets  # a second to import: only where needed

    try:
        return getattr(datasets, function)(name, *arguments, **more)
    except Exception as error:  # the name, split or config is unknown, there is no network, ...
        reason = first_line(error) + (f"; no network: {offline}" if offline else "")
        raise UserError(f"{name}: no local path, and `datasets` can't load it ({reason})") from error


def _take(blocks, limit):
    """The first blocks that hold `limit` bytes together."""
    for block in blocks:
        yield block
        limit -= block.size()
        if limit <= 0:
            break


class Splits:
    """The splits that a dataset comes with, each for a store; its units are those of its parts, one after the other."""

    def __init__(self, parts: dict[str, Files] | dict[str, Rows], options: DatasetConfig):
        """parts: by the names of their stores."""
        self.parts, self.options = parts, replace(options, validation_fraction=0)
        self.measure, self.unit_size = parts["train"].measure, parts["train"].unit_size
        *self._begins, self.unit_count = itertools.accumulate((part.unit_count for part in parts.values()), initial=0)
        totals = [part.total for part in parts.values()]
        self.total = None if None in totals else sum(filter(None, totals))
        self.left_out = list(dict.fromkeys(name for part in parts.values() for name in part.left_out))

    def store_of(self, unit: int) -> str:
        return list(self.parts)[bisect.bisect_right(self._begins, unit) - 1]

    def describe(self) -> dict:
        return {"splits": {name: part.describe() for name, part in self.parts.items()}}

    def blocks(self, position: dict | None = None, unit: int = 0) -> Iterator[TextBlock]:
        name = self.store_of(unit)
        begin = self._begins[list(self.parts).index(name)]
        for block in self.parts[name].blocks(position, unit - begin):
            yield block._replace(done=block.done + begin * self.unit_size)

    def sample(self, limit: int) -> Iterator[TextBlock]:
        """Of the training split only."""
        return self.parts["train"].sample(limit)


TextSource = Files | Rows | Splits


def _splits_of_name(name, options):
    found = _official(name, _ask_datasets("get_dataset_split_names", name, options.config or None))
    return {store: Rows(name, replace(options, split=split)) for store, split in found.items()}


def _local_splits(name, path, options):
    """Of a save_to_disk folder, or of files and folders named by their splits."""
    if (state := Path(path, "dataset_dict.json")).exists():
        found = _official(name, _read_state(state, "splits"))
        return {store: Files(*find_files(path, options.format, split), options) for store, split in found.items()}
    files, left_out = find_files(path, options.format, "")
    by_word: dict[str, list[tuple[str, str]]] = {}
    for file, kind in files:
        for word in set(re.split(r"[^a-z]+", os.path.relpath(file, path).lower())):
            by_word.setdefault(word, []).append((file, kind))
    return {store: Files(by_word[word], left_out, options) for store, word in _official(name, by_word).items()}


def _official(name: str, names: Iterable[str]) -> dict[str, str]:
    """{store: its split's name in the source}. Raises UserError for anything but one for training, and one or both of
    the others."""
    found = {store: [known for known in spellings if known in names] for store, spellings in SPLITS.items()}
    if twice := next((known for known in found.values() if len(known) > 1), None):
        raise UserError(f"{name}: which split is which? It has {' and '.join(twice)}")
    if not found["train"] or not (found["validation"] or found["test"]):
        shown = ", ".join(known for each in found.values() for known in each) or "none"
        raise UserError(f"{name}: of the splits train, validation and test it has: {shown}; leave --splits=official "
                        "out to hold out a share of the text")
    return {store: known[0] for store, known in found.items() if known}
