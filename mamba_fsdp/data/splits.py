"""The splits that a dataset comes with, training, validation and test, as one source of text: each for a store."""

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from config.dataset_config import DatasetConfig
from mamba_fsdp.data.documents import TextBlock
from mamba_fsdp.data.hub import why_offline
from mamba_fsdp.data.text import Files, Rows, find_files
from mamba_fsdp.errors import UserError, first_line

NAMES = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}


class Splits:
    """Its units are those of its parts, one after the other; see text.py for what a source of text has."""

    def __init__(self, parts: dict[str, Files | Rows], options: DatasetConfig):
        """parts: by the names of their stores."""
        self.parts, self.options = parts, replace(options, validation_fraction=0)
        first = next(iter(parts.values()))
        self.measure, self.unit_size, self.most_documents = first.measure, first.unit_size, None
        *self._begins, self.unit_count = itertools.accumulate((part.unit_count for part in parts.values()), initial=0)
        totals = [part.total for part in parts.values()]
        self.total = None if None in totals else sum(filter(None, totals))
        self.left_out = list(dict.fromkeys(name for part in parts.values() for name in part.left_out))

    def store_of(self, unit: int) -> str:
        return max((begin, name) for begin, name in zip(self._begins, self.parts) if begin <= unit)[1]

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


def open_splits(name: str, options: DatasetConfig) -> Splits:
    """Those of INPUT: a datasets name, a save_to_disk folder, or files and folders named by their splits. Raises
    UserError where it has none but one for training."""
    path = os.path.expanduser(name)
    if name == "builtin":
        official(name, ())
    if not os.path.lexists(path):
        found = official(name, _names_of_dataset(name, options))
        return Splits({store: Rows(name, replace(options, split=split)) for store, split in found.items()}, options)
    if options.config or options.streaming:
        raise UserError(f"{name}: --config and --streaming are for `datasets` names, and this is a local path")
    if (state := Path(path, "dataset_dict.json")).exists():
        found = official(name, json.loads(state.read_bytes())["splits"])
        return Splits({store: Files(*find_files(path, options.format, split), options=options)
                       for store, split in found.items()}, options)
    files, left_out = find_files(path, options.format, "")
    by_word: dict[str, list[tuple[str, str]]] = {}
    for file, kind in files:
        for word in set(re.split(r"[^a-z]+", os.path.relpath(file, path).lower())):
            by_word.setdefault(word, []).append((file, kind))
    found = official(name, by_word)
    return Splits({store: Files(by_word[word], left_out, options) for store, word in found.items()}, options)


def official(name: str, names: Iterable[str]) -> dict[str, str]:
    """{store: its split's name in the source}. Raises UserError for anything but one for training, and one or both of
    the others."""
    names = list(names)
    found = {store: [known for known in spellings if known in names] for store, spellings in NAMES.items()}
    if twice := next((known for known in found.values() if len(known) > 1), None):
        raise UserError(f"{name}: which split is which? It has {' and '.join(twice)}")
    if not found["train"] or not (found["validation"] or found["test"]):
        shown = ", ".join(known for each in found.values() for known in each) or "none"
        raise UserError(f"{name}: of the splits train, validation and test it has: {shown}; leave --splits=official "
                        "out to hold out a share of the text")
    return {store: known[0] for store, known in found.items() if known}


def _names_of_dataset(name, options):
    offline = why_offline()
    import datasets

    try:
        return datasets.get_dataset_split_names(name, options.config or None)
    except Exception as error:
        reason = first_line(error) + (f"; no network: {offline}" if offline else "")
        raise UserError(f"{name}: no local path, and `datasets` can't tell its splits ({reason})") from error
