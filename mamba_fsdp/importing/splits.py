"""Finds the splits of an input by the names of its files, and finds missing parts of numbered sets of files."""

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mamba_fsdp.importing.compression import strip_compression
from mamba_fsdp.importing.kinds import SAVED_SPLITS, SPLITS
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.retry import is_file

WORD = re.compile("[a-z]+")
NUMBERING = re.compile(r"\d+([-_]of[-_]\d+)?")
PART = re.compile(r"(.*?)(\d+)([-_]of[-_])(\d+)(.*)")  # matches train-00000-of-00003.parquet


class SplitName(NamedTuple):
    """The split that the name of a file or folder contains."""

    split: str  # a key of SPLITS, or ""
    rest: tuple[str, ...]  # all words of the name; "" takes the place of the split


def splits_of(files: list[Path], root: Path, options: DatasetConfig) -> list[str]:
    """Returns the split of each file: the name of the outermost folder or file on its path below `root` that is a split; "" if
    there is none.

    Files (or folders) next to each other are splits if their names differ in only one word, and this word is train in one of
    them and another word in SPLITS in the others. If the options ask for splits, a name with such a word is enough. All
    names in a folder are splits if `datasets` has saved several splits there, or if one of them is the name given by --split.
    """
    names = {file: _split_name(file.name, is_file=True) for file in files}
    for folder in {folder for file in files for folder in file.parents if folder.name}:
        names[folder] = _split_name(folder.name, is_file=False)
    trained = {(entry.parent, name.rest) for entry, name in names.items() if name.split == "train"}
    folders = {entry.parent for entry in names}
    divided = {folder for folder in folders if is_file(root / folder / SAVED_SPLITS)}
    divided |= {entry.parent for entry in names if entry.name == options.split}
    is_asked_for = bool(options.split) or options.splits == "official"
    splits = {
        entry
        for entry, name in names.items()
        if entry.parent in divided
        or name.split
        and (is_asked_for or (entry.parent, name.rest) in trained)
    }
    return [_outermost(file, splits) for file in files]


def _outermost(file: Path, splits: set[Path]) -> str:
    """Returns the name of the outermost split among the file and its parent folders; "" if there is none."""
    for entry in [*reversed(file.parents), file]:
        if entry in splits:
            return entry.name
    return ""


def _split_name(name: str, is_file: bool) -> SplitName:
    """Returns the split in the name of a file or folder. Numbers and file name extensions are ignored. The name of a folder is
    a split only if it does not contain other words."""
    if is_file:
        name = os.path.splitext(strip_compression(name))[0]
    words = WORD.findall(NUMBERING.sub(" ", name.lower()))
    split = named_split(name)
    rest = ["" if word in SPLITS.get(split, ()) else word for word in words]
    if is_file:
        return SplitName(split, (*rest, "file"))
    return SplitName(split if rest == [""] else "", tuple(rest))


def named_split(name: str) -> str:
    """Returns the key of SPLITS for the words of a name; "" if they belong to none or to several splits."""
    words = set(WORD.findall(name.lower()))
    splits = [split for split, names in SPLITS.items() if words.intersection(names)]
    return splits[0] if len(splits) == 1 else ""


def missing_parts(files: list[Path]) -> Iterator[Path]:
    """Yields the files that are missing from numbered sets such as train-00000-of-00003.parquet."""
    sets = defaultdict(set)
    for file in files:
        match = PART.fullmatch(file.name)
        if match:
            before, number, between, count, after = match.groups()
            sets[file.parent, before, between, count, after].add(int(number))
    for (folder, before, between, count, after), numbers in sets.items():
        first = int(max(numbers) == int(count))  # some programs count from 1
        for number in range(first, first + int(count)):
            if number not in numbers:
                yield folder / f"{before}{number:0{len(count)}d}{between}{count}{after}"
