"""What INPUT of get_dataset.py names: which files are read, or which name of `datasets`, and what each one is.

INPUT -> a Corpus: pieces, each for one store or for a deal between train and validation -> reading.py
"""

import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from config.dataset_config import DatasetConfig
from mamba_fsdp.errors import UserError
from mamba_fsdp.storage import read_object

ARCHIVES = (".gz", ".zst")
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
    ".npy": "datalayout",
}
READ_TOGETHER = ("text", "json", "arrow", "datalayout")  # many files are one piece of the input
SAVED_TO_DISK = ("state.json", "dataset_info.json")  # files of a folder of save_to_disk
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
# Folders of the standard library's that are not its own.
NOT_BUILTIN = {"site-packages", "dist-packages", "__pycache__"}


@dataclass
class Piece:
    """A part of the input that one IterableDataset of `datasets` reads."""

    kind: str  # text, json, csv, parquet, arrow, datalayout, save_to_disk or hub
    names: list[str]  # its files; of a save_to_disk folder that folder; of kind hub the name
    store: str = ""  # the store it belongs to; empty: train, and what is held out of it
    split: str = ""  # of kind hub and save_to_disk


@dataclass
class Corpus:
    """All of the input."""

    pieces: list[Piece]
    left_out: list[str]  # names of files that are not read, as their names tell no format
    official: bool  # each piece belongs to one of the input's own splits

    @property
    def stores(self) -> list[str]:
        """Names of the stores that are named by pieces."""
        return list(dict.fromkeys(piece.store or "train" for piece in self.pieces))

    def describe(self) -> dict:
        """What the input is at this moment, by its files' names, sizes and times."""
        files = [name for piece in self.pieces for name in _files_of(piece)]
        kinds = {name: piece.kind for piece in self.pieces for name in _files_of(piece)}
        if not files:
            first = self.pieces[0]
            return {"dataset": first.names[0], "splits": [piece.split for piece in self.pieces]}
        digest = hashlib.sha256()
        size = 0
        for name in files:
            stat = _stat(name)
            size += stat.st_size
            line = f"\0{kinds[name]}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
            digest.update(os.fsencode(name) + line.encode())
        first_name = os.fsencode(files[0]).decode(errors="replace")
        return {
            "files": len(files),
            "first": first_name,
            "bytes": size,
            "digest": digest.hexdigest(),
        }

    def part(self, number: int, count: int) -> tuple[list[Piece], bool]:
        """Returns (the pieces of part `number` of `count`, whether it takes each `count`-th document only): its share
        of the files, by their sizes and in their order; all files where there are fewer of them than parts."""
        files = [(piece, name) for piece in self.pieces for name in piece.names]
        if count == 1:
            return self.pieces, False
        if len(files) < count:
            return self.pieces, True
        sizes = [_size(piece, name) for piece, name in files]
        total = sum(sizes) or 1
        chosen: dict[int, Piece] = {}
        before = 0
        for (piece, name), size in zip(files, sizes):
            middle = before + size / 2
            before += size
            if int(middle * count / total) == number:
                empty = Piece(piece.kind, [], piece.store, piece.split)
                chosen.setdefault(id(piece), empty).names.append(name)
        return list(chosen.values()), False


def open_corpus(name: str, options: DatasetConfig) -> Corpus:
    """The input that INPUT names: local files, else what `datasets` loads. Raises UserError where nothing is found."""
    path = os.path.expanduser(name)
    is_local = name == "builtin" or os.path.lexists(path) or glob.has_magic(path)
    if not is_local and _looks_local(name):
        raise UserError(f"{name}: no such file or folder")
    if is_local and options.config:
        raise UserError(f"{name}: --config is for `datasets` names, and this is a local path")
    official = options.splits == "official"
    if not is_local:
        return Corpus(_hub_pieces(name, options), [], official)
    files, left_out = find_files(path, options.format)
    if official:
        return Corpus(_official_pieces(path, files), left_out, official)
    saved = [Path(file) for file, kind in files if kind == "save_to_disk"]
    if options.split and not any((folder / "dataset_dict.json").exists() for folder in saved):
        raise UserError(f"--split={options.split}: {name} has no splits; leave --split out")
    return Corpus(_grouped(files, split=options.split), left_out, official)


def find_files(name: str, format: str = "auto") -> tuple[list[tuple[str, str]], list[str]]:
    """Returns (the files of a path, a glob or builtin in order, each (absolute path, kind); the names of those in
    folders whose kind is unknown). Raises UserError where there are none to read."""
    places = [Path(name)]
    if name == "builtin":
        places = builtin_files()
        format = "text"
    elif glob.has_magic(name) and not os.path.exists(name):
        places = [Path(place) for place in sorted(glob.glob(name, recursive=True))]
    if not places:
        raise UserError(f"{name}: no file matches this pattern")
    found = []
    left_out = []
    for place in places:
        if not place.is_dir():
            kind = kind_of(place, format)
            if not kind:
                raise UserError(
                    f"{place}: can't tell its format by its name; add --format=text (or json, parquet, arrow)"
                )
            found.append((place, kind))
            continue
        for path, kind in _walk(place, format):
            if kind:
                found.append((path, kind))
            else:
                left_out.append(path.name)
    if not found:
        raise UserError(
            f"{name}: no file named {', '.join(KINDS)} in it; --format=text takes every file as text"
        )
    return [(str(path.absolute()), kind) for path, kind in found], left_out


def builtin_files() -> list[Path]:
    """The UTF-8 .py files of the running interpreter's library, sorted. Raises UserError where it has no sources."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
        if not NOT_BUILTIN.intersection(path.relative_to(root).parts) and _is_utf8(path)
    ]
    if not files:
        raise UserError(
            f"{root}: this Python comes without its library's source files; name another INPUT"
        )
    return files


def kind_of(path: Path, format: str = "auto") -> str | None:
    """How a file is read, by its name where the format is auto; None for a name that doesn't tell."""
    if format != "auto":
        return format
    name = path.name.lower()
    for suffix in ARCHIVES:
        name = name.removesuffix(suffix)
    kind = KINDS.get(os.path.splitext(name)[1])
    is_archive = path.suffix.lower() in ARCHIVES
    if is_archive and kind in ("parquet", "arrow", "datalayout"):
        return None
    return kind


def what_lies_at(path: Path) -> tuple[str, bool] | None:
    """(a title, whether it is token ids) of the text or others' tokens at `path`; None where it is neither."""
    if is_saved_to_disk(path):
        return "a save_to_disk folder of datasets", True
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.*")) + sorted(path.rglob("*.arrow"))
    for file in files:
        kind = kind_of(file)
        if kind == "datalayout":
            return f"DataLayout tokens ({file.name})", True
        if kind == "arrow":
            return f"tokens or text in Arrow files ({file.name})", True
        if kind and file.suffix != ".md":
            return f"text ({file.name})", False
    return None


def is_saved_to_disk(path: Path) -> bool:
    """Whether `datasets` wrote this folder with save_to_disk."""
    if (path / "dataset_dict.json").is_file():
        return True
    return all((path / name).is_file() for name in SAVED_TO_DISK)


def _is_utf8(path):
    """Some of Python's own tests are written in other encodings, or broken on purpose."""
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def _walk(folder, format):
    """Yields (path, kind or None) of each file below a folder, hidden ones left out, linked folders followed once."""
    seen = set()
    for here, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        real = os.path.realpath(here)
        if real in seen:
            folders[:] = []
            continue
        seen.add(real)
        if is_saved_to_disk(Path(here)):
            folders[:] = []
            yield Path(here), "save_to_disk"
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if "meta" in folders and any(Path(here, "meta").glob("*counts*.csv")):
            folders.remove("meta")  # tables of fms-fsdp that count the documents of its Arrow files
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(here, name), kind_of(Path(here, name), format)


def _grouped(files, store="", split=""):
    """The pieces of (path, kind) pairs in order: neighbours of a kind of READ_TOGETHER are one."""
    pieces: list[Piece] = []
    for name, kind in files:
        if pieces and pieces[-1].kind == kind and kind in READ_TOGETHER:
            pieces[-1].names.append(name)
        else:
            pieces.append(Piece(kind, [name], store, split))
    return pieces


def _files_of(piece):
    if piece.kind == "hub":
        return []
    if piece.kind == "save_to_disk":
        return [str(path) for path in sorted(Path(piece.names[0]).rglob("*.arrow"))]
    return piece.names


def _size(piece, name):
    if piece.kind == "hub":
        return 1
    if piece.kind == "save_to_disk":
        return sum(_stat(file).st_size for file in _files_of(piece))
    return _stat(name).st_size


def _stat(name):
    try:
        return os.stat(name)
    except OSError as error:
        _refuse(error)
        raise


def _refuse(error):
    raise UserError(f"{error.filename}: can't be read ({error.strerror})") from error


def _looks_local(name):
    stem = name.lower()
    for archive in ARCHIVES:
        stem = stem.removesuffix(archive)
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or stem.endswith(tuple(KINDS))


def _hub_pieces(name, options):
    if options.splits != "official":
        return [Piece("hub", [name], split=options.split or "train")]
    from mamba_fsdp.data.reading import ask_datasets

    found = _match_splits(
        name, ask_datasets("get_dataset_split_names", name, options.config or None)
    )
    return [Piece("hub", [name], store, split) for store, split in found.items()]


def _official_pieces(path, files):
    """Of a save_to_disk folder of several splits, or of files and folders named by their splits."""
    table = Path(path, "dataset_dict.json")
    if table.exists():
        splits = read_object(table, {"splits": [""]}, "save it again")["splits"]
        found = _match_splits(path, splits)
        return [
            Piece("save_to_disk", [os.path.abspath(path)], store, split)
            for store, split in found.items()
        ]
    by_word: dict[str, list[tuple[str, str]]] = {}
    for file, kind in files:
        for word in set(re.split(r"[^a-z]+", os.path.relpath(file, path).lower())):
            by_word.setdefault(word, []).append((file, kind))
    pieces = []
    for store, word in _match_splits(path, by_word).items():
        pieces += _grouped(by_word[word], store)
    return pieces


def _match_splits(name: str, names: Iterable[str]) -> dict[str, str]:
    """{store: its split's name in the source}. Raises UserError unless there is one for training, and one or both of
    the others."""
    found = {}
    for store, spellings in SPLITS.items():
        known = [spelling for spelling in spellings if spelling in names]
        if len(known) > 1:
            raise UserError(f"{name}: which split is which? It has {' and '.join(known)}")
        if known:
            found[store] = known[0]
    if "train" not in found or len(found) < 2:
        raise UserError(
            f"{name}: of the splits train, validation and test it has: {', '.join(found) or 'none'}; leave "
            "--splits=official out to hold out a share of the text"
        )
    return found
