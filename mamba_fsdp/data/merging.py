"""The last step of tokenising: the shards of all units, in their order, become the stores. Nothing is copied but the
shard whose end is held out where the documents are too few.

Killed in the middle it is begun again by whoever comes next: what it starts from stays until dataset.json is written.
"""

import contextlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from mamba_fsdp.data.text import Files, Rows
from mamba_fsdp.data.tokenizer import TextTokenizer
from mamba_fsdp.data.units import exact, store_names, unit_name, writer
from mamba_fsdp.durable import write_atomically
from mamba_fsdp.errors import UserError
from mamba_fsdp.formats import DATASET
from mamba_fsdp.storage import patiently

AT_ONCE = 16  # files: each is a round trip on a network file system
REASONS = {"empty": "empty documents", "skipped": "with invalid UTF-8"}


def merge(out: Path, folder: Path, settings: dict, source: Files | Rows, tokenizer: TextTokenizer) -> None:
    """folder: OUT/.progress, with all units finished, which is removed. Raises UserError where there is no text or too
    little, and where the input is another by now."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        units = list(pool.map(lambda unit: _read(folder / f"{unit_name(unit)}.json"), range(source.unit_count)))
    counts = {name: sum(unit["counts"][name] for unit in units) for name in REASONS}
    left_out = ", ".join(f"{count:,} {REASONS[name]}" for name, count in counts.items() if count)
    left_out = f"left out: {left_out}" if left_out else ""
    if not (written := sum(unit["written"] for unit in units)):
        raise UserError(f"the input holds no text ({left_out or 'it is empty'})")
    if source.describe() != settings["input"]:
        raise UserError("the input changed while it was read; start again with --overwrite")
    names = store_names(settings["validation_fraction"])
    shards = {name: [(folder / unit_name(number) / name / shard["name"], shard)
                     for number, unit in enumerate(units) for shard in unit["stores"][name]] for name in names}
    last = shards["train"].pop() if "validation" in names and not shards["validation"] else None
    stores = {name: writer(out / name, source, tokenizer, _put_together(out / name, shards[name])) for name in names}
    held_out = _hold_out_end(last[0], stores, exact(settings["validation_fraction"]), tokenizer) if last else 0
    stores["train"].end_document()
    done = {**DATASET.header(), "settings": settings, "tokenizer": tokenizer.identity,
            "vocab_size": tokenizer.vocab_size, "counts": counts,
            "stores": {name: {"tokens": store.token_count, "documents": store.document_count}
                       for name, store in stores.items()}}
    for path in [*out.glob(".*.tmp"), *(path for name in names for path in (out / name).rglob(".*.tmp"))]:
        path.unlink()  # what a kill left of files that were being written
    for store in stores.values():
        store.finish()
    write_atomically(out / "dataset.json", json.dumps(done, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    if held_out:
        print(f"held out for validation: the last {held_out:,} tokens (a validation_fraction of "
              f"{settings['validation_fraction']:g} of {written:,} document{'s' * (written > 1)} is no whole one)")
    for store in stores.values():
        print(f"{store.path}: {store.token_count:,} tokens in {store.document_count:,} documents")
    seconds, tokens = sum(unit["seconds"] for unit in units), sum(store.token_count for store in stores.values())
    print(f"vocabulary {tokenizer.vocab_size:,} ({store.dtype.name}); {seconds:.1f} s"
          f"{' of all parts together' * bool(source.options.part)}, {tokens / max(seconds, 1e-9):,.0f} tokens/s"
          f"{' a part' * bool(source.options.part)}{f'; {left_out}' if left_out else ''}")


def _read(path):
    return json.loads(patiently(path.read_bytes, path))


def _put_together(store, shards):
    """Gives the shards, each (path without suffix, entry), their numbers in the store; what a writer resumes from."""
    entries = [{**shard, "name": f"{number:05d}"} for number, (_, shard) in enumerate(shards)]

    def move(old, new):
        if not new.exists():
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                patiently(lambda: old.rename(new), new)

    pairs = [(Path(f"{path}.{suffix}"), store / f"{entry['name']}.{suffix}")
             for (path, _), entry in zip(shards, entries) for suffix in ("bin", "doc")]
    store.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(move, *zip(*pairs)))
    return {"shards": entries}


def _hold_out_end(path, stores, fraction, tokenizer):
    """Too few documents for a whole one: the last tokens, of the last shard, become the validation store. Returns their
    number."""
    train, validation = stores["train"], stores["validation"]
    tokens = np.fromfile(f"{path}.bin", train.dtype)
    total = train.token_count + len(tokens)
    first, decode = max(1, len(tokens) - max(2, round(total * fraction))), tokenizer.backend.decode
    cut = next((at for at in range(first, len(tokens) - 1) if tokens[at] != train.eos
                and not decode(tokens[max(0, at - 8):at].tolist()).endswith("\ufffd")), 0)  # not in a character
    if not cut:
        raise UserError(f"{total} tokens are too few to hold some out; use --overwrite --validation_fraction=0")
    train.append(tokens[:cut])
    validation.append(tokens[cut:])
    return len(tokens) - cut
