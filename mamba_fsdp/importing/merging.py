"""Combines the files that all parts have written into token stores.

The files are moved, not copied. If the process is killed, the next process repeats the merge: the states of the parts are kept
until dataset.json has been written.
"""

import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mamba_fsdp.data.store import StoreFile, StoreWriter, TokenStore, WriterState
from mamba_fsdp.data.tokenizer import TextTokenizer
from mamba_fsdp.errors import UserError
from mamba_fsdp.importing.kinds import CLEAN, DATASET, LeftOut
from mamba_fsdp.importing.progress import PartState, write_settings
from mamba_fsdp.importing.reading import LINE_ENDS, SKIPPED
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.retry import delete, list_names, make_folder, move
from mamba_fsdp.storage.typed_json import FileName
from mamba_fsdp.text import format_count

MIN_VALIDATION_TOKENS = 32
MAX_COMPARED = 1_000_000  # duplicates are counted among at most this many documents
DUPLICATES = "exact duplicates"
EMPTY = "empty documents"
SKIPPED_FILES = "that can't be read, from the first error on"


def writer_of(
    folder: Path, tokenizer: TextTokenizer, options: DatasetConfig, state: WriterState
) -> StoreWriter:
    """Returns a writer of a store, or of one part's share of it, that resumes from `state`."""
    assert tokenizer.eos is not None  # a tokenizer without an eos can't be loaded
    return StoreWriter(
        folder,
        tokenizer.vocab_size,
        tokenizer.eos,
        tokenizer.identity,
        options.shard_tokens,
        options.pack == "document",
        state,
    )


def merge(
    out: Path,
    parts: Sequence[tuple[Path, PartState]],
    tokenizer: TextTokenizer,
    options: DatasetConfig,
    settings: dict[str, Any],
    left_out: LeftOut,
) -> None:
    """Writes the stores in `out` and dataset.json, and prints what was left out.

    parts: the folder and the state of each part. Raises UserError if there is no text, or too little for training or
    validation."""
    # {store: [(folder of the part, entry in the index) of each file]}
    files: defaultdict[str, list[tuple[Path, StoreFile]]] = defaultdict(list)
    unreadable: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for folder, state in parts:
        unreadable.update(state.unreadable)
        counts += Counter(state.counts) + Counter({EMPTY: state.empty})
        for name, written in state.stores.items():
            files[name] += [(folder / name, entry) for entry in written.files]
    tokens = {name: sum(entry.tokens for _, entry in written) for name, written in files.items()}
    smallest: float = MIN_VALIDATION_TOKENS
    if not any(tokens.values()):
        raise UserError("the input contains no text; give files that contain text")
    if options.splits == "held_out" and "validation" in tokens:
        wanted = options.validation_fraction * sum(tokens.values())
        smallest = min(wanted, tokens["validation"])
    if smallest < MIN_VALIDATION_TOKENS:
        raise UserError(
            f"--validation_fraction={options.validation_fraction:.3g} holds out {int(smallest)} of the input's "
            f"{format_count(sum(tokens.values()), 'token')} for validation, fewer than {MIN_VALIDATION_TOKENS}; start again with "
            "--overwrite and a larger fraction, or with --overwrite --validation_fraction=0 for no validation split"
        )
    if not tokens.get("train"):
        raise UserError(
            "no tokens of the input are in the training split; give more documents, or start again with --overwrite "
            "--validation_fraction=0"
        )
    stores = []
    for name in files:
        path = out / name
        # A process that was killed during a merge can have left temporary files.
        for folder in (out, path, path / "tokenizer"):
            for temporary in list_names(folder):
                if temporary.endswith(".tmp"):
                    delete(folder / temporary)
        tokenizer.save(path / "tokenizer")
        entries = _move_into(path, files[name])
        store = writer_of(path, tokenizer, options, WriterState(entries)).finish()
        stores.append(store)
        print(
            f"{path}: {format_count(store.token_count, 'token')} in {format_count(store.document_count, 'document')}"
        )
    if options.pack == "document":
        counts[DUPLICATES] = _count_duplicates(stores)
    write_settings(out / DATASET, {**settings, "unreadable": list(unreadable)})
    print(f"vocabulary {tokenizer.vocab_size:,}")
    left_out[SKIPPED_FILES] += unreadable.values()
    faults = [state.fault for _, state in parts if state.fault]
    _report(left_out, counts, faults)


def _report(left_out: LeftOut, counts: Counter[str], faults: list[str]) -> None:
    """Prints what was left out, and which kept content is usually not wanted. faults: the problems of unreadable records."""
    for line in left_out.lines():
        print(line)
    for reason in (SKIPPED, EMPTY):
        if counts[reason]:
            example = f": {faults[0]}" if reason == SKIPPED else ""
            print(f"left out: {counts[reason]:,} {reason}{example}")
    kept = [f"{counts[reason]:,} {reason}" for reason in (DUPLICATES, LINE_ENDS) if counts[reason]]
    if kept:
        print(f"kept as they are: {', '.join(kept)}; {CLEAN}")


def _count_duplicates(stores: list[TokenStore]) -> int:
    """Counts documents that have the same tokens as an earlier document, among the first MAX_COMPARED documents."""
    seen = set()
    compared = 0
    for store in stores:
        for number in range(len(store.index.files)):
            tokens, starts = store.map_file_pair(number)
            starts = starts[: MAX_COMPARED - compared]
            compared += len(starts)
            for start, end in itertools.pairwise([*starts.tolist(), len(tokens)]):
                seen.add(hash(tokens[start:end].tobytes()))
    return compared - len(seen)


def _move_into(store: Path, files: list[tuple[Path, StoreFile]]) -> list[StoreFile]:
    """Moves the files into the store, with consecutive numbers as names. Returns their entries in the index of the store."""
    make_folder(store, parents=True)
    entries = []
    for number, (folder, entry) in enumerate(files):
        name = FileName(f"{number:05d}")
        entries.append(replace(entry, name=name))
        for suffix in ("bin", "doc"):
            with contextlib.suppress(FileNotFoundError):  # a killed process has moved it already
                move(folder / f"{entry.name}.{suffix}", store / f"{name}.{suffix}")
    return entries
