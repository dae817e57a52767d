"""What INPUT of get_dataset.py names, as shards: files, save_to_disk folders, or the shards of a name on the Hub."""

import contextlib
import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
ARCHIVES = (".gz", ".zst")  # of text, JSON and CSV
STORES = {  # name of a store: what the input's own split for it may be called
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
# Folders of the standard library's that are not its own.
NOT_BUILTIN = {"site-packages", "dist-packages", "__pycache__"}


@dataclass
class Shard:
    """A part of the input that is read from its beginning on."""

    name: str  # path of the file or save_to_disk folder, or name on the Hub
    kind: str  # of KINDS, save_to_disk or hub
    split: str = ""  # of save_to_disk and hub; of a file the words of its path below INPUT
    store: str = ""  # the store it becomes; empty: train, and what is held out of it
    number: int = 0  # of kind hub: this one ...
    count: int = 1  # ... of so many


class Document(NamedTuple):
    """A document, or a part of a long one."""

    content: str | np.ndarray  # text, or token ids (n,)
    begins: bool = True  # whether the document begins here
    ends: bool = True  # whether it ends here


def find_shards(input: str, options: DatasetConfig) -> list[Shard]:
    """The shards of what `input` names, in order. Raises UserError where there is nothing to read."""
    path = os.path.expanduser(input)
    is_local = input == "builtin" or os.path.lexists(path) or glob.has_magic(path)
    if is_local:
        shards = list(_local_shards(path, options.format))
    else:
        shards = _hub_shards(input, options)
    if options.splits == "official":
        return _official(input, shards)
    if any(shard.kind in ("hub", "save_to_disk") and shard.split for shard in shards):
        wanted = options.split or "train"
        chosen = [shard for shard in shards if shard.split == wanted]
        if not chosen:
            names = dict.fromkeys(shard.split for shard in shards)
            raise UserError(
                f"{input}: no split {wanted!r}; name one of {', '.join(names)} with --split"
            )
        return chosen
    if options.split:
        raise UserError(f"--split={options.split}: {input} has no splits; leave --split out")
    return shards


def describe(shards: list[Shard]) -> dict:
    """What the input is at this moment: its files' names, sizes and times."""
    if shards[0].kind == "hub":
        return {"dataset": shards[0].name, "splits": sorted({shard.split for shard in shards})}
    digest = hashlib.sha256()
    size = 0
    for shard in shards:
        files = [shard.name]
        if shard.kind == "save_to_disk":
            files = sorted(map(str, Path(shard.name, shard.split).glob("*.arrow")))
        for name in files:
            stat = os.stat(name)
            size += stat.st_size
            digest.update(os.fsencode(name))
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


def is_saved_to_disk(path: Path) -> bool:
    """Whether `datasets` wrote this folder with save_to_disk."""
    if (path / "dataset_dict.json").is_file():
        return True
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def _local_shards(name, format) -> Iterator[Shard]:
    places = [Path(name)]
    if name == "builtin":
        places = builtin_files()
        format = "text"
    elif glob.has_magic(name) and not os.path.exists(name):
        places = [Path(place) for place in sorted(glob.glob(name, recursive=True))]
    found = 0
    left_out = []
    for place in places:
        for path in _files_below(place):
            kind = "save_to_disk" if path.is_dir() else kind_of(path, format)
            if not kind:
                left_out.append(path.name)
                continue
            found += 1
            for split in _splits_of(path) or [os.path.relpath(path, name)]:
                yield Shard(str(path.absolute()), kind, split)
    if not found:
        raise UserError(
            f"{name}: no file named {', '.join(KINDS)} there; --format=text takes every file as text"
        )
    if left_out:
        print(
            f"left out: {len(left_out):,} files whose names don't tell a format, such as "
            f"{ascii(left_out[0])}; --format=text takes all as text"
        )


def _files_below(place: Path) -> Iterator[Path]:
    """A file itself; below a folder each file and save_to_disk folder, hidden ones left out, links followed once."""
    if not place.is_dir():
        yield place
        return
    seen = set()
    for here, folders, names in os.walk(place, onerror=_refuse, followlinks=True):
        folder = Path(here)
        is_known = folder.resolve() in seen
        seen.add(folder.resolve())
        if is_known or is_saved_to_disk(folder):
            folders.clear()
            if not is_known:
                yield folder
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            # Tables of fms-fsdp's that count documents, and what DataLayout says of a file's size, are no text.
            is_count = folder.name == "meta" and "counts" in name
            if not name.startswith(".") and not is_count and not name.endswith(".npy.size"):
                yield folder / name


def _splits_of(path):
    """Names of the splits of a save_to_disk folder, one without a name where it is one data set; none of a file."""
    table = path / "dataset_dict.json"
    if not path.is_dir():
        return []
    if not table.exists():
        return [""]
    return read_object(table, {"splits": [""]}, "save it again")["splits"]


def _refuse(error):
    raise UserError(f"{error.filename}: can't be read ({error.strerror})") from error


def _hub_shards(name, options):
    import datasets  # a second to import: only where needed

    shards = []
    try:
        splits = [options.split or "train"]
        if options.splits == "official":
            splits = datasets.get_dataset_split_names(name, options.config or None)
        for split in splits:
            count = open_on_hub(name, options.config, split).num_shards
            shards += [Shard(name, "hub", split, "", number, count) for number in range(count)]
    except Exception as error:  # the name, split or config is unknown, there is no network, ...
        raise UserError(
            f"{name}: no file or folder here, and `datasets` can't load it ({first_line(error)})"
        ) from error
    return shards


def open_on_hub(name: str, config: str, split: str):
    """A split of a name on the Hub, streaming."""
    import datasets

    return datasets.load_dataset(name, config or None, split=split, streaming=True)


def _official(input, shards):
    """The shards that belong to one of STORES by the words of their split."""
    chosen = []
    for store, spellings in STORES.items():
        for shard in shards:
            words = re.split(r"[^a-z]+", shard.split.lower())
            if not set(spellings).isdisjoint(words):
                chosen.append(replace(shard, store=store))
    found = list(dict.fromkeys(shard.store for shard in chosen))
    if "train" not in found or len(found) < 2:
        raise UserError(
            f"{input}: of the splits train, validation and test it has: {', '.join(found) or 'none'}; leave "
            "--splits=official out to hold out a share of the text"
        )
    return chosen
