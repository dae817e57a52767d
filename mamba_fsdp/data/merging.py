"""The shards of all parts become token stores: nothing is copied, but the shard whose end is held out where the
documents are too few. Killed, it is begun again by whoever comes next: what it starts from stays until dataset.json is
written."""

import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mamba_fsdp.data.store import StoreWriter
from mamba_fsdp.data.tokenizer import TextTokenizer
from mamba_fsdp.errors import UserError
from mamba_fsdp.formats import DATASET
from mamba_fsdp.storage import move, write_atomically

AT_ONCE = 16  # files: each is a round trip on a network file system
COPIED = 1 << 20  # tokens at a time


def merge(
    out: Path,
    parts: Sequence[tuple[Path, Any]],
    tokenizer: TextTokenizer,
    settings: dict[str, Any],
    names: Sequence[str],
) -> dict[str, Any]:
    """Writes the stores `names` in `out` of the parts, each (its folder, its PartState), and returns the content of
    dataset.json. Raises UserError where there is no text, or a split without any."""
    empty = sum(state.empty for _, state in parts)
    left_out = f"; left out: {empty:,} empty documents" if empty else ""
    if not sum(state.written for _, state in parts):
        raise UserError(f"the input holds no text{left_out}")
    if any(state.tokenizer != tokenizer.identity for _, state in parts):
        raise UserError(
            f"{out}: its parts have different tokenizers; remove it by hand and start again"
        )
    shards = {name: _shards_of(name, parts) for name in names}
    last = None
    fraction = settings["validation_fraction"]
    if fraction and settings["splits"] != "official" and not shards["validation"]:
        last = shards["train"].pop()
    for name in names:
        if not shards[name] and not last:
            raise UserError(f"the split for {out / name} holds no text")
    vocab_size = tokenizer.vocab_size
    is_known = tokenizer.backend or settings["vocab_size"]
    if not is_known:
        vocab_size = 1 + max(tokenizer.eos, *(state.highest for _, state in parts))
    assert tokenizer.eos is not None  # or it would not have been loaded
    writers = {}
    for name in names:
        tokenizer.save(out / name / "tokenizer")
        writers[name] = StoreWriter(
            out / name,
            vocab_size=vocab_size,
            dtype="" if is_known else "<u4",
            eos=tokenizer.eos,
            tokenizer=tokenizer.identity,
            shard_tokens=settings["shard_tokens"],
            whole=settings["pack"] == "document",
            state=_put_together(out / name, shards[name]),
        )
    held_out = 0
    if last:
        held_out = _hold_out_end(last[0], writers, fraction, tokenizer)
    if settings["pack"] == "document":
        writers["train"].end_document()
    stores = {
        name: {"tokens": writer.token_count, "documents": writer.document_count}
        for name, writer in writers.items()
    }
    done = {
        **DATASET.header(),
        "settings": settings,
        "tokenizer": tokenizer.identity,
        "vocab_size": vocab_size,
        "counts": {"empty": empty},
        "stores": stores,
    }
    for path in out.rglob(".*.tmp"):
        path.unlink()  # what a kill left of files that were being written
    for writer in writers.values():
        writer.finish()
    write_atomically(out / "dataset.json", json.dumps(done, indent=1) + "\n")
    if held_out:
        print(
            f"held out for validation: the last {held_out:,} tokens, as a share of the documents is none"
        )
    for name, store in stores.items():
        print(f"{out / name}: {store['tokens']:,} tokens in {store['documents']:,} documents")
    seconds = sum(state.seconds for _, state in parts)
    tokens = sum(store["tokens"] for store in stores.values())
    print(
        f"vocabulary {vocab_size:,}; {seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s{left_out}"
    )
    return done


def _shards_of(name, parts):
    """(path without suffix, entry in the index) of each shard of a store."""
    return [
        (folder / name / shard["name"], shard)
        for folder, state in parts
        for shard in state.stores.get(name, {"shards": []})["shards"]
    ]


def _put_together(store: Path, shards: list) -> dict[str, Any]:
    """Gives the shards their numbers in the store; what a writer resumes from."""
    entries = [{**shard, "name": f"{number:05d}"} for number, (_, shard) in enumerate(shards)]
    pairs = []
    for (path, _), entry in zip(shards, entries):
        for suffix in ("bin", "doc"):
            pairs.append((Path(f"{path}.{suffix}"), store / f"{entry['name']}.{suffix}"))

    def take(pair):
        with contextlib.suppress(FileNotFoundError):  # moved before a kill
            move(*pair)

    store.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(take, pairs))
    return {"shards": entries}


def _hold_out_end(
    path: Path, writers: dict[str, StoreWriter], fraction: float, tokenizer: TextTokenizer
) -> int:
    """Too few documents for a whole one: the last tokens, of the last shard, become the validation store. Returns their
    number."""
    train = writers["train"]
    tokens = np.memmap(f"{path}.bin", train.dtype, "r")
    total = train.token_count + len(tokens)
    wanted = max(2, round(total * fraction))
    for cut in range(max(1, len(tokens) - wanted), len(tokens) - 1):
        if tokens[cut] != train.eos and not _is_in_character(tokens, cut, tokenizer):
            break
    else:
        raise UserError(
            f"{total} tokens are too few to hold some out; use --overwrite --validation_fraction=0"
        )
    for writer, part in ((train, tokens[:cut]), (writers["validation"], tokens[cut:])):
        for begin in range(0, len(part), COPIED):
            writer.append(part[begin : begin + COPIED])
    return len(tokens) - cut


def _is_in_character(tokens, at, tokenizer):
    if not tokenizer.backend:
        return False
    text = tokenizer.backend.decode(tokens[max(0, at - 8) : at].tolist())
    return text.endswith("\ufffd")
