"""Makes token stores of the files that all parts have written.

The files are moved, not copied, except one that is cut to hold its end out if there are too few documents. If the
process is killed, the next one starts over: the inputs of the merge stay until dataset.json is written.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from mamba_fsdp.data.progress import MADE, PartState, write_settings
from mamba_fsdp.data.reading import MOST_NAMED
from mamba_fsdp.data.store import StoreFile, StoreWriter, WriterState
from mamba_fsdp.data.tokenizer import TextTokenizer
from mamba_fsdp.errors import UserError, counted
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.patience import move
from mamba_fsdp.storage.typed_json import FileName


@dataclass
class WrittenFile:
    """A file of token ids that a part has written, with its file of document starts."""

    path: Path  # without the suffix
    entry: StoreFile


def writer_of(
    folder: Path, tokenizer: TextTokenizer, options: DatasetConfig, state: WriterState
) -> StoreWriter:
    """Returns the writer of a store, or of one part's share of it, which resumes from `state`."""
    assert tokenizer.eos is not None  # loading refuses a tokenizer without one
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
) -> None:
    """Writes the stores in `out` and dataset.json. parts: each part's folder and state. Raises UserError if there is no
    text."""
    files: dict[str, list[WrittenFile]] = {}
    unreadable: dict[str, str] = {}
    for folder, state in parts:
        unreadable.update(state.unreadable)
        for name, written in state.stores.items():
            of_part = [WrittenFile(folder / name / entry.name, entry) for entry in written.files]
            files[name] = files.get(name, []) + of_part
    if unreadable:
        print(
            f"{counted(len(unreadable), 'file')} can't be read and are left out from the first fault on:"
        )
        for fault in list(unreadable.values())[:MOST_NAMED]:
            print(f"  {fault}")
    if not files["train"]:
        raise UserError("the input holds no text")
    if files.get("validation") == []:
        _hold_out_end(files, parts[-1][0] / "held_out", tokenizer, options)
    counts = {}
    for name in files:
        path = out / name
        # A process that was killed while it wrote them left these.
        for left in [*out.glob(".*.tmp"), *path.rglob(".*.tmp")]:
            left.unlink()
        tokenizer.save(path / "tokenizer")
        entries = _move_into(path, files[name])
        store = writer_of(path, tokenizer, options, WriterState(entries)).finish()
        counts[name] = store.token_count
        print(
            f"{path}: {counted(store.token_count, 'token')} in {counted(store.document_count, 'document')}"
        )
    most = max(2, 2 * options.validation_fraction * sum(counts.values()))  # an end has at least 2
    if options.splits == "held_out" and counts.get("validation", 0) > most:
        print(
            "validation has more than twice its share: whole documents are held out, and they are few or of unequal "
            "lengths; in text, --documents=lines makes shorter ones"
        )
    empty = sum(state.empty for _, state in parts)
    write_settings(out / MADE, {**settings, "unreadable": list(unreadable)})
    print(f"vocabulary {tokenizer.vocab_size:,}; empty documents left out: {empty:,}")


def exact(fraction: float) -> Fraction:
    """Returns the fraction that a user wrote, such as 1/100 for 0.01."""
    return Fraction(fraction).limit_denominator(10**6)


def _move_into(store: Path, files: list[WrittenFile]) -> list[StoreFile]:
    """Moves the files into the store, under new numbers. Returns their entries in its index."""
    store.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, file in enumerate(files):
        name = FileName(f"{number:05d}")
        entries.append(replace(file.entry, name=name))
        for suffix in ("bin", "doc"):
            with contextlib.suppress(FileNotFoundError):  # an earlier process moved it
                move(Path(f"{file.path}.{suffix}"), store / f"{name}.{suffix}")
    return entries


def _hold_out_end(
    files: dict[str, list[WrittenFile]],
    folder: Path,
    tokenizer: TextTokenizer,
    options: DatasetConfig,
) -> None:
    """Makes the last tokens the validation store if there are too few documents to hold a whole one out.

    The last training file is cut: both of its pieces are written into `folder`, and their entries added to `files`.
    """
    path = files["train"].pop().path
    writers = {name: writer_of(folder / name, tokenizer, options, WriterState()) for name in files}
    tokens = np.memmap(f"{path}.bin", writers["train"].dtype, "r")
    total = len(tokens) + sum(file.entry.tokens for file in files["train"])
    wanted = max(2, round(total * exact(options.validation_fraction)))
    cut = max(1, len(tokens) - wanted)
    if cut >= len(tokens) - 1:
        raise UserError(
            f"can't hold anything out of {counted(total, 'token')}; use --overwrite --validation_fraction=0"
        )
    if tokens[cut] == tokenizer.eos:
        cut += 1
    for name, kept in (("train", tokens[:cut]), ("validation", tokens[cut:])):
        writer = writers[name]
        writer.append(kept)
        if writer.whole and kept[-1] != writer.eos:
            writer.append([writer.eos])
        for entry in writer.finish_files():
            files[name].append(WrittenFile(folder / name / entry.name, entry))
    print(
        f"held out for validation: the last {len(tokens) - cut:,} tokens, since the documents are too few to hold a whole one out"
    )
