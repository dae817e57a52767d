"""Finds the files of the argument INPUT of get_dataset.py: a file, a folder, a glob, or a name on the Hugging Face Hub."""

import contextlib
import datetime
import fnmatch
import glob
import hashlib
import itertools
import os
import stat
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mamba_fsdp.data.hub import prepare_hub
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.importing.kinds import (
    LeftOut,
    check_input,
    files_below,
    folders_below,
    input_kinds,
    unexpected_path_error,
)
from mamba_fsdp.importing.splits import missing_parts, named_split, splits_of
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.retry import exists, is_folder, list_entries, read_bytes, stat_of
from mamba_fsdp.text import format_count, suggest_path

# Folders inside the folder of the standard library that do not belong to it.
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
MAX_MISSING = 1000  # the maximal number of missing files to report


@dataclass
class InputFile:
    """A file of the input, or a split of a name on the Hub."""

    name: str  # path of a file, or name on the Hub
    kind: str  # a key of KINDS in kinds.py
    # The split on the Hub, or the name of the file or folder that makes it a split; see `splits_of`.
    split: str = ""
    store: str = "train"  # the store for its documents, except for held-out ones
    place: str = ""  # the file's path without links
    share_read: float = 0.0  # the share of the file that has been read


class Document(NamedTuple):
    """A document, or a part of a long document."""

    content: str | np.ndarray  # text, or token ids (n,)
    begins: bool = True  # whether the document begins here
    ends: bool = True  # whether it ends here


class Fault(NamedTuple):
    """The problem of a record that can't be read. Later records of the file can be read."""

    reason: str
    advice: str = ""  # advice for the case that all records have this problem

    def message(self) -> str:
        return f"{self.reason}; {self.advice}" if self.advice else self.reason


def find_files(input: str, options: DatasetConfig, left_out: LeftOut) -> list[InputFile]:
    """Returns the files of the input, in order, and adds files that are not read to `left_out`. Raises UserError if there is
    no file to read."""
    if input == "builtin":
        files = [InputFile(str(path), "text", place=str(path)) for path in builtin_files()]
    elif is_local(input):
        files = _local_files(os.path.expanduser(input), options, left_out)
    else:
        prepare_hub(input)
        files = _hub_splits(input, options)
    if options.splits == "official":
        kept = _official_splits(files, input)
    else:
        kept = _files_of_split(files, options, input, left_out)
    if len(files) > 1:
        _check_sets([Path(file.name) for file in kept], options, left_out)
    return kept


def is_local(input: str) -> bool:
    """Returns whether `input` refers to files on this machine. Any other name refers to the Hub, see prepare_hub."""
    path = os.path.expanduser(input)
    return input == "builtin" or exists(path) or glob.has_magic(path)


def describe(files: list[InputFile]) -> dict[str, Any]:
    """Describes the current state of the input as an object for JSON, with a digest of the paths, sizes and modification times
    of the files. Raises UserError for a pipe or a device."""
    if files[0].kind == "hub":
        return {"dataset": files[0].name, "splits": [file.split for file in files]}
    digest = hashlib.sha256()
    size = 0
    newest = 0.0
    places = []
    for file in files:
        try:
            status = stat_of(file.name)
        except OSError:  # a broken link; reading it will raise an error
            continue
        if not stat.S_ISREG(status.st_mode):  # a pipe can't be read twice
            raise UserError(
                f"{file.name} is a pipe or a device; write its output to a file, and name that file"
            )
        size += status.st_size
        newest = max(newest, status.st_mtime)
        places.append(file.place)
        digest.update(os.fsencode(file.place))
        digest.update(f"\0{file.kind}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return {
        "files": len(files),
        "bytes": size,
        "place": ascii(os.path.commonpath(places))[1:-1] if places else "",
        "last change": str(datetime.datetime.fromtimestamp(newest)),
        "digest": digest.hexdigest(),
    }


def builtin_files() -> list[Path]:
    """Returns the sorted paths of the UTF-8 .py files in the standard library of the running Python.
    Raises UserError if this Python is installed without sources."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py"), key=Path.as_posix):
        if EXCLUDED_FOLDERS.intersection(path.relative_to(root).parts):
            continue
        # Some of Python's own tests have other encodings, or invalid bytes on purpose.
        with contextlib.suppress(UnicodeDecodeError):
            read_bytes(path).decode()
            files.append(path)
    if not files:
        raise UserError(
            f"{root}: this Python is installed without the source files of its library; name another INPUT"
        )
    return files


def _local_files(name: str, options: DatasetConfig, left_out: LeftOut) -> list[InputFile]:
    if options.format == "auto" and exists(name):
        check_input(name)
    places = [Path(name)]
    if glob.has_magic(name) and not exists(name):
        places = _expand_glob(Path(name), left_out)
    found = dict.fromkeys(file for place in places for file in files_below(place, left_out))
    kinds = input_kinds(list(found), left_out, options.format, options.dtype)
    if not kinds:
        raise unexpected_path_error(name, "text or token ids to import")
    files = list(kinds)
    root = Path(os.path.commonpath([place.parent for place in places]))
    if len(places) == 1 and is_folder(places[0]):
        root = places[0]
    splits = splits_of([path.relative_to(root) for path in files], root, options)
    by_place: dict[str, InputFile] = {}
    for path, split in zip(files, splits):
        place = os.path.realpath(path)
        if place in by_place:
            left_out["named twice or linked to another"].append(str(path))
        else:
            by_place[place] = InputFile(str(path), kinds[path].name, split, place=place)
    return list(by_place.values())


def _expand_glob(pattern: Path, left_out: LeftOut) -> list[Path]:
    """Returns the sorted paths that match a glob pattern. glob.glob is not used, because it ignores folders that
    can't be read. This function raises UserError or OSError for them."""
    parts = pattern.parts
    depth = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    places = [Path(*parts[:depth])]
    for part in parts[depth:]:
        found = set()
        for folder in filter(is_folder, places):
            if part == "**":
                found |= {below for below, _ in folders_below(folder, left_out)}
                continue
            for name in fnmatch.filter(list_entries(folder), part):
                if part[0] == "." or name[0] != ".":  # other patterns don't match hidden names
                    found.add(folder / name)
        places = sorted(found, key=str)
    return places


def _hub_splits(name: str, options: DatasetConfig) -> list[InputFile]:
    import datasets  # imported here because the import takes a second

    try:
        splits = datasets.get_dataset_split_names(name, options.config or None)
    except Exception as error:  # for example an unknown name or config, or no network
        raise UserError(
            f"{name}: there is no such file or folder, and `datasets` can't load it from the Hub ({first_line(error)})"
            f"{suggest_path(Path(name))}"
        ) from error
    return [InputFile(name, "hub", split) for split in splits]


def _official_splits(files: list[InputFile], input: str) -> list[InputFile]:
    """Sets the store of each file to its split, and returns the files. Raises UserError if a file does not belong to a split,
    or if no file belongs to train."""
    for file in files:
        file.store = named_split(file.split)
    stores = {file.store for file in files}
    if "" in stores or "train" not in stores:
        raise UserError(
            f"--splits=official: not all files or folders of {input} are named after the splits train, "
            "validation and test; without this option, a share of the tokens is held out"
        )
    return files


def _files_of_split(
    files: list[InputFile], options: DatasetConfig, input: str, left_out: LeftOut
) -> list[InputFile]:
    """Returns the files of the split that the options select, and prints the reason for the selection. Raises UserError if
    the split has no files."""
    wanted = options.split or "train"
    names = {file.split for file in files}
    chosen = {name for name in names if name == wanted or wanted == "all"}
    chosen = chosen or {name for name in names if named_split(name) == wanted}
    if not options.split:
        chosen.add("")
    kept = [file for file in files if file.split in chosen]
    if not kept:
        choices = [*filter(None, sorted(names)), "all"]
        raise UserError(
            f"--split={wanted}: {input} has no split of this name; accepted: {', '.join(choices)}"
        )
    others = sorted(names - chosen)
    left_out["of other splits"] += [file.name for file in files if file.split in others]
    if others:
        print(
            f"only the split {wanted} is read; {len(files) - len(kept):,} of {format_count(len(files), 'file')} belong to other "
            f"splits according to their names ({', '.join(others[:4])}); --split=all reads all files"
        )
    else:
        print(
            f"training reads all of {format_count(len(files), 'file')}, because their names do not show a split; "
            f"{options.validation_fraction:.3g} of the tokens are held out for validation"
        )
    return kept


def _check_sets(files: list[Path], options: DatasetConfig, left_out: LeftOut) -> None:
    """Raises UserError if a part of a numbered set of files is missing. With skip_unreadable, adds it to `left_out` instead."""
    missing = [str(file) for file in itertools.islice(missing_parts(files), MAX_MISSING)]
    if missing and not options.skip_unreadable:
        more = f", like {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise UserError(
            f"{missing[0]} is missing from its numbered set{more}; copy the file, or import the other files with "
            "--skip_unreadable=true"
        )
    left_out["missing from their numbered sets"] += missing
