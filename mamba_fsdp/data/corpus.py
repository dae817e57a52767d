"""What INPUT of get_dataset.py names, as shards: files, save_to_disk folders, or the shards of a name on the Hub."""

import contextlib
import functools
import glob
import hashlib
import os
import re
import socket
import stat
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.request import getproxies

import numpy as np

from mamba_fsdp.data.store import SPLITS, near_path
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage import exists, read_object

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
ARCHIVES = {".gz": "gzip", ".zst": "zstd"}  # of text, JSON and CSV
HUB = ("huggingface.co", 443)
HUB_SECONDS = 5.0  # in which it answers, or counts as out of reach
SAVED = {"_data_files": [{"filename": ...}]}  # in state.json of a folder that `datasets` saved
# Folders of the standard library's that are not its own.
NOT_BUILTIN = {"site-packages", "dist-packages", "__pycache__"}


@dataclass
class Shard:
    """A part of the input that is read from its beginning on."""

    name: str  # path of a file, or name on the Hub
    kind: str  # of KINDS, or hub
    split: str = ""  # of a name on the Hub; the folder or file named after a split
    store: str = "train"  # of SPLITS: where its documents go that are not held out


class Document(NamedTuple):
    """A document, or a part of a long one."""

    content: str | np.ndarray  # text, or token ids (n,)
    begins: bool = True  # whether the document begins here
    ends: bool = True  # whether it ends here


def find_shards(input: str, options: DatasetConfig) -> list[Shard]:
    """The shards of what `input` names, in order. Raises UserError where there is nothing to read."""
    read = _local_shards if is_local(input) else _hub_shards
    return _of_the_split(read(os.path.expanduser(input), options), options, input)


def is_local(input: str) -> bool:
    """Whether `input` names files here; else see ask_hub."""
    path = os.path.expanduser(input)
    if input == "builtin" or exists(path) or glob.has_magic(path):
        return True
    ask_hub(path)
    return False


@functools.cache  # said and tried once
def ask_hub(name: str) -> None:
    """Says that the Hub is asked for a name, as nothing here is called so. Raises UserError for one that looks like a path.

    Libraries try for half a minute to reach the Hub. Where it is out of reach, those that are imported later are told
    to be content with their cache.
    """
    hint = near_path(Path(name))
    if not name or name.startswith((".", "/")) or name.count("/") > 1 or kind_of(Path(name)):
        raise UserError(f"{name}: there is no such file or folder{hint}")
    told = f"asking the Hugging Face Hub for {name}: no file or folder is called so here{hint}"
    print(told, file=sys.stderr, flush=True)
    if "HF_HUB_OFFLINE" not in os.environ and not _hub_answers():
        print("the Hub can't be reached; looking in its cache", file=sys.stderr, flush=True)
        os.environ["HF_HUB_OFFLINE"] = "1"


def _hub_answers() -> bool:
    """Whether the Hub takes a connection. Taken for granted where a proxy or a mirror is set."""
    if getproxies() or "HF_ENDPOINT" in os.environ:
        return True
    answers = threading.Event()

    def connect():
        with contextlib.suppress(OSError):
            socket.create_connection(HUB).close()
            answers.set()

    # Looking up the name, and trying one address after the other, can take much longer.
    connecting = threading.Thread(target=connect, daemon=True)
    connecting.start()
    connecting.join(HUB_SECONDS)
    return answers.is_set()


def _of_the_split(shards: list[Shard], options: DatasetConfig, input: str) -> list[Shard]:
    """The shards that the options ask for, with their stores. Prints what is left out. Raises UserError where none is."""
    names = {shard.split for shard in shards}
    wanted = options.split or "train"
    chosen = {wanted} & names or {name for name in names if named_split(name) == wanted}
    each_is_named = bool(chosen) and "" not in map(named_split, names)
    if options.splits == "official":
        for shard in shards:
            shard.store = named_split(shard.split)
        if not each_is_named:
            raise UserError(
                f"--splits=official: the files or folders of {input} are not all named after the splits train, "
                "validation and test; leave it out, and a share of the text is held out"
            )
    if wanted == "all" or options.splits == "official":
        chosen = names
    if not options.split:
        chosen.add("")
    kept = [shard for shard in shards if shard.split in chosen]
    if not kept:
        raise UserError(f"--split={wanted}: there is none of that name in {input}")
    if len(kept) < len(shards):
        told = (
            f"left out: {', '.join(sorted(names - chosen)[:4])} ({len(shards) - len(kept):,} of {len(shards):,} "
            f"files), other splits than {wanted}; --split=all reads them too"
        )
        if each_is_named:
            told += ", --splits=official makes stores of them"
        print(told)
    return kept


def describe(shards: list[Shard]) -> dict:
    """What the input is at this moment: its files' names, sizes and times."""
    if shards[0].kind == "hub":
        return {"dataset": shards[0].name, "splits": [shard.split for shard in shards]}
    digest = hashlib.sha256()
    size = 0
    for shard in shards:
        try:
            found = os.stat(shard.name)
        except OSError as error:  # a link to nowhere
            _refuse(error)
        if not stat.S_ISREG(found.st_mode):  # it is read more than once
            raise UserError(
                f"{shard.name}: is a pipe or a device; write what it gives to a file, and name that"
            )
        size += found.st_size
        digest.update(os.fsencode(Path(shard.name).absolute()))
        digest.update(f"\0{shard.kind}\0{found.st_size}\0{found.st_mtime_ns}\n".encode())
    first = str(Path(shards[0].name).absolute())
    return {"files": len(shards), "first": first, "bytes": size, "digest": digest.hexdigest()}


def builtin_files() -> list[Path]:
    """The UTF-8 .py files of the running interpreter's library, sorted. Raises UserError where it has no sources."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py"), key=Path.as_posix):
        if NOT_BUILTIN.intersection(path.relative_to(root).parts):
            continue
        # Some of Python's own tests are written in other encodings, or broken on purpose.
        with contextlib.suppress(UnicodeDecodeError):
            path.read_bytes().decode()
            files.append(path)
    if not files:
        raise UserError(
            f"{root}: this Python comes without its library's source files; name an INPUT"
        )
    return files


def kind_of(path: Path, format: str = "auto") -> str | None:
    """How a file is read, by its name where the format is auto; None for a name that doesn't tell."""
    if format != "auto":
        return format
    name = path.name.lower()
    for ending in ARCHIVES:
        name = name.removesuffix(ending)
    return KINDS.get(os.path.splitext(name)[1])


def _local_shards(name, options) -> list[Shard]:
    if name == "builtin":
        return [Shard(str(path), "text") for path in builtin_files()]
    places = _places_of(name)
    kinds = {
        path: kind_of(path, options.format) for place in places for path in _files_below(place)
    }
    files = _with_a_kind(name, kinds)
    root = _root_of(places)
    splits = _splits_of([path.relative_to(root) for path in files], options.split or "train")
    return [Shard(str(path), str(kinds[path]), split) for path, split in zip(files, splits)]


def _places_of(name: str) -> list[Path]:
    """The files and folders that a path means, or a pattern."""
    if glob.has_magic(name) and not os.path.exists(name):
        return [Path(place) for place in sorted(glob.glob(name, recursive=True))]
    return [Path(name)]


def _with_a_kind(name: str, kinds: dict[Path, str | None]) -> list[Path]:
    """The files that can be read; the others are told. Raises UserError where there is none."""
    files = [path for path, kind in kinds.items() if kind]
    if not files:
        raise UserError(
            f"{name}: no file named {', '.join(KINDS)} there; --format=text takes every file as text"
        )
    unknown = [path.name for path, kind in kinds.items() if not kind]
    if unknown:
        print(
            f"left out: {len(unknown):,} files whose names don't tell a format, such as "
            f"{ascii(unknown[0])}; --format=text takes all as text"
        )
    return files


def _root_of(places: list[Path]) -> Path:
    """The folder whose parts can be splits: the one that was named, else the one that holds all places."""
    if len(places) == 1 and places[0].is_dir():
        return places[0]
    return Path(os.path.commonpath([place.parent for place in places]))


def _splits_of(files: list[Path], wanted: str) -> list[str]:
    """The name of the folder or file that makes each file, by its path within the input, part of a split; "" if none.

    Whatever lies beside a folder `wanted` is a split. Elsewhere a folder named after one is, and a file named after one
    where something beside it is named after train.
    """
    entries = {entry for file in files for entry in [file, *file.parents]}
    have_train = {entry.parent for entry in entries if named_split(entry.name) == "train"}
    splits = []
    for file in files:
        split = ""
        for entry in [file, *file.parents][:-1]:  # outwards: the outermost counts
            is_named = named_split(entry.name) and (entry != file or entry.parent in have_train)
            if is_named or entry.parent / wanted in entries:
                split = entry.name
        splits.append(split)
    return splits


def named_split(name: str) -> str:
    """The split, of SPLITS, that a folder, a file or a split is named after; "" for none or several."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    found = [split for split, names in SPLITS.items() if words.intersection(names)]
    return found[0] if len(found) == 1 else ""


def _files_below(place: Path) -> Iterator[Path]:
    """A file itself; the files in a folder, hidden ones left out, links followed once. Of folders that `datasets` saved
    those that hold the rows."""
    if not place.is_dir():
        yield place
        return
    seen = set()
    for here, folders, names in os.walk(place, onerror=_refuse, followlinks=True):
        folder = Path(here)
        target = folder.resolve()
        if target in seen:
            folders.clear()
            continue
        seen.add(target)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if "dataset_dict.json" in names:
            names = []
        if "state.json" in names and "dataset_info.json" in names:
            saved = read_object(folder / "state.json", SAVED, "save it again")
            names = [file["filename"] for file in saved["_data_files"]]
        for name in sorted(names):
            # Tables of fms-fsdp's that count documents, and what DataLayout says of a file's size, are no text.
            is_count = folder.name == "meta" and "counts" in name
            if not name.startswith(".") and not is_count and not name.endswith(".npy.size"):
                yield folder / name


def _refuse(error):
    raise UserError(f"{error.filename}: can't be read ({error.strerror})") from error


def _hub_shards(name, options) -> list[Shard]:
    import datasets  # a second to import: only where needed

    try:
        splits = datasets.get_dataset_split_names(name, options.config or None)
    except Exception as error:  # the name, split or config is unknown, there is no network, ...
        raise UserError(
            f"{name}: no file or folder here, and `datasets` can't load it ({first_line(error)}){near_path(Path(name))}"
        ) from error
    return [Shard(name, "hub", split) for split in splits]
