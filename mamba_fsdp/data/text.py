"""Sources of text: files, or what `datasets` loads, in units of whole documents, each read as blocks.

    INPUT -> parts: one, or the official splits -> units, which one process works on at a time -> blocks (readers.py)
          -> documents (documents.py)

What is in a unit, and how it is cut into blocks, depends on the input only.
"""

import bisect
import glob
import hashlib
import itertools
import math
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from config.dataset_config import DatasetConfig
from mamba_fsdp.data.documents import TextBlock
from mamba_fsdp.data.hub import why_offline
from mamba_fsdp.data.readers import (
    ARCHIVES,
    BLOCK_BYTES,
    ROWS,
    place_to_cut,
    read_blocks,
    table_blocks,
)
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.storage import read_object

UNIT_BYTES = 1 << 30  # of the input, all files end to end; about a shard of tokens
UNIT_ROWS = 1 << 20  # of a datasets name
KINDS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
NO_CORPUS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
}  # folders of the standard library's that are not its own
STORES = ("train", "validation", "test")
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}


def open_source(name: str, options: DatasetConfig) -> "TextSource":
    """The source that INPUT names: local files, else what `datasets` loads. Raises UserError where nothing is found."""
    path = os.path.expanduser(name)
    local = name == "builtin" or os.path.lexists(path) or glob.has_magic(path)
    if local and (options.config or options.streaming):
        raise UserError(
            f"{name}: --config and --streaming are for `datasets` names, and this is a local path"
        )
    if not local and _looks_local(name):
        raise UserError(f"{name}: no such file or folder")
    if options.splits == "official":
        return TextSource(
            _local_splits(name, path, options) if local else _splits_of_name(name, options), options
        )
    part = (
        Files(*find_files(path, options.format, options.split), options)
        if local
        else Rows(name, options)
    )
    return TextSource({"train": part}, options)


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
        elif kind := kind_of(place, format):
            found.append((place, kind))
        else:
            raise UserError(
                f"{place}: can't tell its format by its name; add --format=text (or json, parquet, arrow)"
            )
    if not found:
        raise UserError(
            f"{name}: no file named {', '.join(KINDS)} in it; --format=text takes every file as text"
        )
    return [(str(path.absolute()), kind) for path, kind in found], left_out


def corpus_files() -> list[Path]:
    """The UTF-8 .py files of the running interpreter's library, sorted. Raises UserError where it has no sources."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
        if not NO_CORPUS.intersection(path.relative_to(root).parts) and _is_utf8(path)
    ]
    if not files:
        raise UserError(
            f"{root}: this Python comes without its library's source files; name another INPUT"
        )
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
            splits = read_object(here / "dataset_dict.json", {"splits": [""]}, "save it again")[
                "splits"
            ]
            folders[:] = (split or "train").split("+")
            if missing := [name for name in folders if name not in splits]:
                raise UserError(
                    f"{here}: no split {missing[0]!r}; name one of {', '.join(splits)} with --split"
                )
        elif (
            "state.json" in names and "dataset_info.json" in names
        ):  # save_to_disk: the state names its files
            state = read_object(
                here / "state.json", {"_data_files": [{"filename": ...}]}, "save it again"
            )
            yield from ((here / file["filename"], "arrow") for file in state["_data_files"])
            folders[:] = []
        else:
            yield from (
                (here / name, kind_of(here / name, format))
                for name in sorted(names)
                if name[0] != "."
            )


def _refuse(error):
    raise UserError(f"{error.filename}: can't be read ({error.strerror})") from error


def kind_of(path: Path, format: str = "auto") -> str | None:
    """How a file is read, by its name where the format is auto; None for a name that doesn't tell."""
    if format != "auto":
        return format
    name = path.name.lower()
    for suffix in ARCHIVES:
        name = name.removesuffix(suffix)
    kind = KINDS.get(os.path.splitext(name)[1])
    return None if kind in ("parquet", "arrow") and path.suffix in ARCHIVES else kind


def _looks_local(name):
    return (
        name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or any(
            name.lower().removesuffix(archive).endswith(tuple(KINDS)) for archive in ("", *ARCHIVES)
        )
    )


class Files:
    """Files on disk, one after the other; their units are of unit_size bytes of the input."""

    def __init__(self, files: list[tuple[str, str]], left_out: list[str], options: DatasetConfig):
        """files: (path, kind) of each; left_out: names of those that are not read."""
        self.files, self.left_out, self.options = files, left_out, options
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
        return {
            "files": len(self.files),
            "first": self.files[0][0],
            "bytes": self.total,
            "digest": digest.hexdigest(),
        }

    def blocks(self, unit: int) -> Iterator[TextBlock]:
        """Of the documents that begin in the unit's bytes, or in row groups and files that do and can't be cut."""
        low = unit * self.unit_size
        high = low + self.unit_size if unit + 1 < self.unit_count else math.inf
        first = bisect.bisect_left(self._begins, low)
        for number in range(max(0, first - 1), bisect.bisect_left(self._begins, high)):
            file, begin = self.files[number], self._begins[number]
            start, end = (place_to_cut(*file, self.options, at - begin) for at in (low, high))
            if number >= first or start != end:
                for block in read_blocks(*file, self.options, start, end):
                    yield block._replace(done=begin + min(block.done, 1) * self._sizes[number])

    def sample(self, limit: int) -> Iterator[TextBlock]:
        """Blocks from the whole breadth of the input, about `limit` bytes of it."""
        count, share = len(self.files), limit
        if self.total > limit:
            count = max(1, min(count, limit // min(BLOCK_BYTES, self.total // count + 1)))
            share = limit // count
        for number in range(count):
            yield from _take(
                read_blocks(*self.files[number * len(self.files) // count], self.options), share
            )


class Rows:
    """What `datasets.load_dataset` gives for a name: a table, with units of unit_size rows, or a stream, of which each
    shard is one."""

    left_out = ()

    def __init__(self, name: str, options: DatasetConfig):
        self.name, self.options = name, options
        config, split, streaming = (
            options.config or None,
            options.split or "train",
            options.streaming,
        )
        self._rows = _ask_datasets("load_dataset", name, config, split=split, streaming=streaming)
        self.total = None if streaming else len(self._rows)
        self.unit_size = 0 if streaming else UNIT_ROWS
        self.unit_count = max(
            1, self._rows.num_shards if streaming else math.ceil(len(self._rows) / UNIT_ROWS)
        )
        self._description = {
            "dataset": name,
            "config": config,
            "split": split,
            "streaming": streaming,
            "fingerprint": None if streaming else self._rows._fingerprint,
        }

    def describe(self) -> dict:
        return self._description

    def blocks(self, unit: int) -> Iterator[TextBlock]:
        begin = unit * self.unit_size
        if self.total is not None:
            rows = self._rows.select(range(begin, min(begin + self.unit_size, self.total)))
        else:
            rows = self._rows.shard(self.unit_count, unit) if self.unit_count > 1 else self._rows

        def batches(before):
            for batch in rows.with_format("arrow").iter(batch_size=ROWS):
                yield before, batch, before + len(batch)
                before += len(batch)

        return table_blocks(self.name, self.options.text_column, batches(begin))

    def sample(self, limit: int) -> Iterator[TextBlock]:
        return _take(
            (block for unit in range(self.unit_count) for block in self.blocks(unit)), limit
        )


def _ask_datasets(function, name, *arguments, **more):
    offline = why_offline()
    import datasets  # a second to import: only where needed

    try:
        return getattr(datasets, function)(name, *arguments, **more)
    except Exception as error:  # the name, split or config is unknown, there is no network, ...
        reason = first_line(error) + (f"; no network: {offline}" if offline else "")
        raise UserError(
            f"{name}: no local path, and `datasets` can't load it ({reason})"
        ) from error


def _take(blocks, limit):
    """The first blocks that hold `limit` bytes together."""
    for block in blocks:
        yield block
        limit -= block.size
        if limit <= 0:
            break


class TextSource:
    """What INPUT names: its parts by the names of their stores, and their units, one part's after the other's.

    options: with official splits, which are whole, none are held out. stores: the names of those that it becomes.
    total: in bytes or rows, as unit_size; None: not known.
    """

    def __init__(self, parts: Mapping[str, Files | Rows], options: DatasetConfig):
        official = options.splits == "official"
        self.parts, self.options = (
            parts,
            replace(options, validation_fraction=0) if official else options,
        )
        self.stores = (
            tuple(parts) if official else STORES[:2] if options.validation_fraction else STORES[:1]
        )
        self.unit_size = parts["train"].unit_size
        self._units = [
            (name, number) for name, part in parts.items() for number in range(part.unit_count)
        ]
        self.unit_count = len(self._units)
        totals = [part.total for part in parts.values()]
        self.total = None if None in totals else sum(filter(None, totals))
        self.left_out = list(
            dict.fromkeys(name for part in parts.values() for name in part.left_out)
        )

    def stores_of(self, unit: int) -> tuple[str, ...]:
        return self.stores if len(self.parts) == 1 else self._units[unit][:1]

    def describe(self) -> dict:
        """What it is, to notice a change."""
        described = {name: part.describe() for name, part in self.parts.items()}
        return {"splits": described} if len(self.parts) > 1 else described["train"]

    def blocks(self, unit: int = 0) -> Iterator[TextBlock]:
        """A unit's; their `done` is what was read of it."""
        name, number = self._units[unit]
        return (
            block._replace(done=block.done - number * self.unit_size)
            for block in self.parts[name].blocks(number)
        )

    def sample(self, limit: int) -> Iterator[TextBlock]:
        """About `limit` bytes of what is trained on."""
        return self.parts["train"].sample(limit)


def _splits_of_name(name, options):
    found = _official(name, _ask_datasets("get_dataset_split_names", name, options.config or None))
    return {store: Rows(name, replace(options, split=split)) for store, split in found.items()}


def _local_splits(name, path, options):
    """Of a save_to_disk folder, or of files and folders named by their splits."""
    if (state := Path(path, "dataset_dict.json")).exists():
        found = _official(name, read_object(state, {"splits": [""]}, "save it again")["splits"])
        return {
            store: Files(*find_files(path, options.format, split), options)
            for store, split in found.items()
        }
    files, left_out = find_files(path, options.format, "")
    by_word: dict[str, list[tuple[str, str]]] = {}
    for file, kind in files:
        for word in set(re.split(r"[^a-z]+", os.path.relpath(file, path).lower())):
            by_word.setdefault(word, []).append((file, kind))
    return {
        store: Files(by_word[word], left_out, options)
        for store, word in _official(name, by_word).items()
    }


def _official(name: str, names: Iterable[str]) -> dict[str, str]:
    """{store: its split's name in the source}. Raises UserError for anything but one for training, and one or both of
    the others."""
    found = {
        store: [known for known in spellings if known in names]
        for store, spellings in SPLITS.items()
    }
    if twice := next((known for known in found.values() if len(known) > 1), None):
        raise UserError(f"{name}: which split is which? It has {' and '.join(twice)}")
    if not found["train"] or not (found["validation"] or found["test"]):
        shown = ", ".join(known for each in found.values() for known in each) or "none"
        raise UserError(
            f"{name}: of the splits train, validation and test it has: {shown}; leave --splits=official "
            "out to hold out a share of the text"
        )
    return {store: known[0] for store, known in found.items() if known}
