"""The shards of all parts become token stores. Nothing is copied, but the shard whose end is held out where the documents
are too few. Killed, it is begun again by whoever comes next: what it starts from stays until dataset.json is written."""

import contextlib
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from mamba_fsdp.data.store import StoreWriter
from mamba_fsdp.data.tokenizer import TextTokenizer
from mamba_fsdp.errors import UserError
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage import DATASET, move, write_object

ShardFiles = tuple[Path, dict]  # their path without suffix, their entry in an index


def part_writer(
    folder: Path, tokenizer: TextTokenizer, options: DatasetConfig, resumed: dict[str, Any]
) -> StoreWriter:
    """A writer of a store, or of one part's share of it."""
    assert tokenizer.eos is not None  # or it would not have been loaded
    return StoreWriter(
        folder,
        tokenizer.vocab_size,
        tokenizer.eos,
        tokenizer.identity,
        options.shard_tokens,
        options.pack == "document",
        resumed,
    )


def merge(
    out: Path,
    parts: Sequence[tuple[Path, Any]],
    tokenizer: TextTokenizer,
    options: DatasetConfig,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Writes the stores in `out` of the parts, each (its folder, its PartState), and returns the content of
    dataset.json. Raises UserError where there is no text."""
    shards: dict[str, list[ShardFiles]] = {}
    for folder, state in parts:
        for name, store in state.stores.items():
            files = [(folder / name / shard["name"], shard) for shard in store["shards"]]
            shards[name] = shards.get(name, []) + files
    if not shards["train"]:
        raise UserError("the input holds no text")
    if shards.get("validation") == []:
        _hold_out_end(shards, parts[-1][0] / "held_out", tokenizer, options)
    stores = {}
    for name, files in shards.items():
        path = out / name
        tokenizer.save(path / "tokenizer")
        entries = _put_together(path, files)
        store = part_writer(path, tokenizer, options, {"shards": entries}).finish()
        stores[name] = {"tokens": store.token_count, "documents": store.document_count}
        print(f"{path}: {store.token_count:,} tokens in {store.document_count:,} documents")
    empty = sum(state.empty for _, state in parts)
    done = {
        **DATASET.header(),
        "settings": settings,
        "tokenizer": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "counts": {"empty": empty},
        "stores": stores,
    }
    write_object(out / "dataset.json", done)
    print(f"vocabulary {tokenizer.vocab_size:,}; empty documents left out: {empty:,}")
    return done


def exact(fraction: float) -> Fraction:
    return Fraction(fraction).limit_denominator(10**6)


def _put_together(store: Path, shards: list[ShardFiles]) -> list[dict]:
    """Moves the shards into the store, numbered anew. Returns their entries in its index."""
    store.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, (path, shard) in enumerate(shards):
        name = f"{number:05d}"
        entries.append({**shard, "name": name})
        for suffix in ("bin", "doc"):
            with contextlib.suppress(FileNotFoundError):  # moved before a kill
                move(Path(f"{path}.{suffix}"), store / f"{name}.{suffix}")
    return entries


def _hold_out_end(
    shards: dict[str, list[ShardFiles]],
    folder: Path,
    tokenizer: TextTokenizer,
    options: DatasetConfig,
) -> None:
    """Too few documents for a whole one: the last tokens, of the last shard, become the validation store. Writes both
    parts of that shard into `folder`."""
    path, _ = shards["train"].pop()
    writers = {name: part_writer(folder / name, tokenizer, options, {}) for name in shards}
    train = writers["train"]
    tokens = np.memmap(f"{path}.bin", train.dtype, "r")
    total = len(tokens) + sum(entry["tokens"] for _, entry in shards["train"])
    wanted = max(2, round(total * exact(options.validation_fraction)))
    cut = max(1, len(tokens) - wanted)
    if cut >= len(tokens) - 1:
        raise UserError(
            f"{total} tokens are too few to hold some out; use --overwrite --validation_fraction=0"
        )
    if tokens[cut] == train.eos:
        cut += 1
    for name, kept in (("train", tokens[:cut]), ("validation", tokens[cut:])):
        writer = writers[name]
        writer.append(kept)
        if writer.whole and kept[-1] != writer.eos:
            writer.append([writer.eos])
        for entry in writer.finish_shards():
            shards[name].append((folder / name / entry["name"], entry))
    print(f"held out for validation: the last {len(tokens) - cut:,} tokens, of few documents")
