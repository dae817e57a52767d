"""What INPUT of get_dataset.py names, as shards: files, save_to_disk folders, or the shards of a name on the Hub."""

import contextlib
import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from config.dataset_config import DatasetConfig
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.storage import read_object

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
# The stores that official splits become, and words by which an input names them.
STORES = {"train": {"train"}, "validation": {"validation", "valid", "val", "dev"}, "test": {"test"}}
ARCHIVES = (".gz", ".zst")  # of text, JSON and CSV
SAVED = {"_data_files": [{"filename": ...}]}  # in state.json of a folder that `datasets` saved
# Folders of the standard library's that are not its own.
NOT_BUILTIN = {"site-packages", "dist-packages", "__pycache__"}


@dataclass
class Shard:
    """A part of the input that is read from its beginning on."""

    name: str  # path of a file, or name on the Hub
    kind: str  # of KINDS, or hub
    split: str = "train"  # of a name on the Hub
    store: str = "train"  # of STORES: where its documents go that are not held out


class Document(NamedTuple):
    """A document, or a part of a long one."""

    content: str | np.ndarray  # text, or token ids (n,)
    begins: bool = True  # whether the document begins here
    ends: bool = True  # whether it ends here


def find_shards(input: str, options: DatasetConfig) -> list[Shard]:
    """The shards of what `input` names, in order. Raises UserError where there is nothing to read."""
    path = os.path.expanduser(input)
    if input != "builtin" and not os.path.lexists(path) and not glob.has_magic(path):
        return _hub_shards(input, options)
    shards = _local_shards(path, options)
    split = options.split
    if split and not any(split in Path(shard.name).parts for shard in shards):
        raise UserError(f"--split={split}: there is none of that name in {input}")
    if not any(shard.store == "train" for shard in shards):
        raise UserError(f"--splits=official: {input} has no split for training")
    return shards


def describe(shards: list[Shard]) -> dict:
    """What the input is at this moment: its files' names, sizes and times."""
    if shards[0].kind == "hub":
        return {"dataset": shards[0].name, "splits": [shard.split for shard in shards]}
    digest = hashlib.sha256()
    size = 0
    for shard in shards:
        stat = os.stat(shard.name)
        size += stat.st_size
        digest.update(os.fsencode(shard.name))
        digest.update(f"\0{shard.kind}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    first = os.fsencode(shards[0].name).decode(errors="replace")
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
    places = [Path(name)]
    format = options.format
    if name == "builtin":
        places = builtin_files()
        format = "text"
    elif glob.has_magic(name) and not os.path.exists(name):
        places = [Path(place) for place in sorted(glob.glob(name, recursive=True))]
    shards = []
    left_out = []
    for place in places:
        for path in _files_below(place, options):
            kind = kind_of(path, format)
            if not kind:
                left_out.append(path.name)
                continue
            shard = Shard(str(path.absolute()), kind)
            if options.splits == "official":
                within = path.relative_to(place) if path != place else path.name
                shard.store = store_of(within)
            shards.append(shard)
    if not shards:
        raise UserError(
            f"{name}: no file named {', '.join(KINDS)} there; --format=text takes every file as text"
        )
    if left_out:
        print(
            f"left out: {len(left_out):,} files whose names don't tell a format, such as "
            f"{ascii(left_out[0])}; --format=text takes all as text"
        )
    return shards


def store_of(name: str | Path) -> str:
    """The store for the official split that a name, or a file by its path, is called after. Raises UserError where it
    is none or two."""
    words = set(re.split(r"[^a-z]+", str(name).lower()))
    found = [store for store, spellings in STORES.items() if words & spellings]
    if len(found) != 1:
        raise UserError(
            f"--splits=official: {name} is named after none of the splits train, validation and test, or after "
            "two; leave it out, and a share of the text is held out"
        )
    return found[0]


def _files_below(place: Path, options: DatasetConfig) -> Iterator[Path]:
    """A file itself; the files in a folder, hidden ones left out, links followed once. Of folders that `datasets` saved
    those that hold the rows, of the split or splits that the options name."""
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
            if options.splits != "official":
                folders[:] = {options.split or "train"}.intersection(folders)
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


def open_on_hub(name: str, config: str, split: str):
    """A split of a name on the Hub, streaming."""
    import datasets  # a second to import: only where needed

    return datasets.load_dataset(name, config or None, split=split, streaming=True)


def _hub_shards(name, options) -> list[Shard]:
    import datasets

    try:
        if options.splits == "official":
            splits = datasets.get_dataset_split_names(name, options.config or None)
            return [Shard(name, "hub", split, store_of(split)) for split in splits]
        split = options.split or "train"
        open_on_hub(name, options.config, split)
        return [Shard(name, "hub", split)]
    except UserError:
        raise
    except Exception as error:  # the name, split or config is unknown, there is no network, ...
        raise UserError(
            f"{name}: no file or folder here, and `datasets` can't load it ({first_line(error)})"
        ) from error
