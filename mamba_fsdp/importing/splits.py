"""Decides from the names of an input's files which of them train and which validate, and finds missing parts of a set."""

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mamba_fsdp.importing.compression import without_ending
from mamba_fsdp.importing.kinds import SAVED_SPLITS, SPLITS
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.retry import is_file

WORD = re.compile("[a-z]+")
NUMBERING = re.compile(r"\d+([-_]of[-_]\d+)?")
PART = re.compile(r"(.*?)(\d+)([-_]of[-_])(\d+)(.*)")  # matches train-00000-of-00003.parquet


class SplitName(NamedTuple):
    """The split that the name of a file or folder contains."""

    split: str  # a key of SPLITS, or empty
    rest: tuple[str, ...]  # all parts of the name that are letters, with "" for the split


def splits_of(files: list[Path], root: Path, options: DatasetConfig) -> list[str]:
    """Returns each file's split: the name of the outermost folder or file on its path below `root` that is one; "" if
    there is none.

    Files, or folders, are splits if their names differ in one word, and that word is train in one of them and a word of
    SPLITS in the others. If the options ask for a split, they need no train next to them. In a folder where `datasets`
    saved several, and next to the folder that --split names, everything is a split.
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
    """Returns the name of the file, or of the folder around it, that is a split and in no other split; "" if none is."""
    for entry in [*reversed(file.parents), file]:
        if entry in splits:
            return entry.name
    return ""


def _split_name(name: str, is_file: bool) -> SplitName:
    """Returns the split in the name of a file or folder. Numbers and endings do not count; a folder has no other words."""
    if is_file:
        name = os.path.splitext(without_ending(name))[0]
    words = WORD.findall(NUMBERING.sub(" ", name.lower()))
    split = named_split(name)
    rest = ["" if word in SPLITS.get(split, ()) else word for word in words]
    if is_file:
        return SplitName(split, (*rest, "file"))
    return SplitName(split if rest == [""] else "", tuple(rest))


def named_split(name: str) -> str:
    """Returns the split, of SPLITS, that a name contains; "" if there is none or several."""
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
        first = int(max(numbers) == int(count))  # some sets begin at 1
        for number in range(first, first + int(count)):
            if number not in numbers:
                yield folder / f"{before}{number:0{len(count)}d}{between}{count}{after}"
