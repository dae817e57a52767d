"""The shards of all parts become token stores. Nothing is copied, but the shard whose end is held out where the documents
are too few. Killed, it is begun again by whoever comes next: what it starts from stays until dataset.json is written."""

import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from config.dataset_config import DatasetConfig
from mamba_fsdp.data.store import StoreWriter
from mamba_fsdp.data.tokenizer import TextTokenizer
from mamba_fsdp.errors import UserError
from mamba_fsdp.storage import DATASET, move, write_atomically

AT_ONCE = 16  # files: each is a round trip on a network file system
COPIED = 1 << 20  # tokens at a time


def merge(
    out: Path,
    parts: Sequence[tuple[Path, Any]],
    tokenizer: TextTokenizer,
    options: DatasetConfig,
    settings: dict[str, Any],
    names: Sequence[str],
) -> dict[str, Any]:
    """Writes the stores `names` in `out` of the parts, each (its folder, its PartState), and returns the content of
    dataset.json. Raises UserError where there is no text, or a split without any."""
    empty = sum(state.empty for _, state in parts)
    written = sum(state.written for _, state in parts)
    left_out = f"; left out: {empty:,} empty documents" if empty else ""
    if not written:
        raise UserError(f"the input holds no text{left_out}")
    if any(state.tokenizer != tokenizer.identity for _, state in parts):
        raise UserError(f"{out}: its parts have different tokenizers; remove it and start again")
    shards = {name: _shards_of(name, parts) for name in names}
    cut = None  # the shard whose end is held out
    if names == ["train", "validation"] and not shards["validation"]:
        cut = shards["train"].pop()
    vocab_size = tokenizer.vocab_size
    if not (tokenizer.backend or options.vocab_size):
        vocab_size = 1 + max(tokenizer.eos, *(state.highest for _, state in parts))
    assert tokenizer.eos is not None  # or it would not have been loaded
    writers = {}
    for name in names:
        if not shards[name] and not cut:
            raise UserError(f"the split for {out / name} holds no text")
        tokenizer.save(out / name / "tokenizer")
        writers[name] = StoreWriter(
            out / name,
            vocab_size=tokenizer.vocab_size,
            eos=tokenizer.eos,
            tokenizer=tokenizer.identity,
            shard_tokens=options.shard_tokens,
            whole=options.pack == "document",
            state=_put_together(out / name, shards[name]),
        )
    if cut:
        held_out = _hold_out_end(cut[0], writers, options.validation_fraction)
        print(
            f"held out for validation: the last {held_out:,} tokens, as {written:,} documents are few"
        )
    if options.pack == "document":
        writers["train"].end_document()
    for path in out.rglob(".*.tmp"):
        path.unlink()  # what a kill left of files that were being written
    stores = {}
    for name, writer in writers.items():
        writer.vocab_size = vocab_size
        store = writer.finish()
        stores[name] = {"tokens": store.token_count, "documents": store.document_count}
        print(f"{out / name}: {store.token_count:,} tokens in {store.document_count:,} documents")
    done = {
        **DATASET.header(),
        "settings": settings,
        "tokenizer": tokenizer.identity,
        "vocab_size": vocab_size,
        "counts": {"empty": empty},
        "stores": stores,
    }
    write_atomically(out / "dataset.json", json.dumps(done, indent=1) + "\n")
    print(f"vocabulary {vocab_size:,}{left_out}")
    return done


def exact(fraction: float) -> Fraction:
    return Fraction(fraction).limit_denominator(10**6)


def _shards_of(name, parts):
    """(path without suffix, entry in the index) of each shard of a store."""
    found = []
    for folder, state in parts:
        for shard in state.stores.get(name, {"shards": []})["shards"]:
            found.append((folder / name / shard["name"], shard))
    return found


def _put_together(store: Path, shards: list) -> dict[str, Any]:
    """Gives the shards their numbers in the store. Returns what a writer resumes from."""
    entries = []
    moves = []
    for number, (path, shard) in enumerate(shards):
        name = f"{number:05d}"
        entries.append({**shard, "name": name})
        for suffix in ("bin", "doc"):
            moves.append((Path(f"{path}.{suffix}"), store / f"{name}.{suffix}"))

    def take(old_and_new):
        with contextlib.suppress(FileNotFoundError):  # moved before a kill
            move(*old_and_new)

    store.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(take, moves))
    return {"shards": entries}


def _hold_out_end(path: Path, writers: dict[str, StoreWriter], fraction: float) -> int:
    """Too few documents for a whole one: the last tokens, of the last shard, become the validation store. Returns their
    number."""
    train = writers["train"]
    tokens = np.memmap(f"{path}.bin", train.dtype, "r")
    total = train.token_count + len(tokens)
    wanted = max(2, round(total * exact(fraction)))
    cut = max(1, len(tokens) - wanted)
    if cut >= len(tokens) - 1:
        raise UserError(
            f"{total} tokens are too few to hold some out; use --overwrite --validation_fraction=0"
        )
    if tokens[cut] == train.eos:
        cut += 1
    for writer, part in ((train, tokens[:cut]), (writers["validation"], tokens[cut:])):
        for begin in range(0, len(part), COPIED):
            writer.append(part[begin : begin + COPIED])
    return len(tokens) - cut
