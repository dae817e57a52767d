"""One unit of the input becomes shards. How far it is lies on disk, so that any process resumes it: it reads again, and
leaves out as many blocks as are done.

    OUT/.progress/settings.json    what all processes share; written before the first unit
    OUT/.progress/00017.lease      which process is at unit 17 (lease.py)
    OUT/.progress/00017.begun      how far it is
    OUT/.progress/00017/train/     its shards, as a StoreWriter numbers them
    OUT/.progress/00017.json       it is finished: its shards and counts

A process that was taken for dead and wakes does no harm to the one that took its unit over: both write the same bytes
to the same places, and the first learns at its next save that it lost.
"""

import itertools
import json
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from mamba_fsdp.data.sampler import splitmix64
from mamba_fsdp.data.store import SHARDS, StoreWriter
from mamba_fsdp.data.text import TextSource
from mamba_fsdp.data.tokenizer import TextTokenizer
from mamba_fsdp.data.workers import Workers
from mamba_fsdp.lease import Lease
from mamba_fsdp.report.console import Console, duration
from mamba_fsdp.storage import read_object, write_atomically

NOTHING_DONE: dict[str, Any] = {
    "blocks": 0,
    "read": 0.0,
    "written": 0,
    "open": False,
    "seconds": 0.0,
    "counts": {"empty": 0},
    "stores": {},
}
OPEN = {"shards": SHARDS, "tokens": 0, "documents": 0, "open": 0}
START_AGAIN = "start again with --overwrite"
NUMBERS = 1 << 24  # between the numbers of the first documents of two units


def unit_name(number: int) -> str:
    return f"{number:05d}"


def writer(
    path: Path, source: TextSource, tokenizer: TextTokenizer, state: dict | None
) -> StoreWriter:
    """Of a store or of a unit's part of it. state: see StoreWriter."""
    assert tokenizer.eos is not None  # or it would not have been loaded
    return StoreWriter(
        path,
        vocab_size=tokenizer.vocab_size,
        eos=tokenizer.eos,
        tokenizer=tokenizer.identity,
        shard_tokens=source.options.shard_tokens,
        whole=source.options.pack == "document",
        state=state,
    )


class Unit:
    """A unit, as far as it is: reads it, deals its documents out to the stores, and records how far it is."""

    def __init__(self, folder: Path, number: int, source: TextSource, tokenizer: TextTokenizer):
        """folder: OUT/.progress."""
        self.path, self.number, self.source, self.tokenizer = (
            folder / unit_name(number),
            number,
            source,
            tokenizer,
        )
        self.progress = json.loads(json.dumps(NOTHING_DONE))
        if (begun := self.path.with_suffix(".begun")).exists():
            self.progress = read_object(begun, {**self.progress, "stores": {"": OPEN}}, START_AGAIN)
        self.stores = {
            name: writer(self.path / name, source, tokenizer, self.progress["stores"].get(name))
            for name in source.stores_of(number)
        }

    def tokenise(
        self, workers: Workers, lease: Lease, bar: "Progress", save_seconds: float
    ) -> None:
        """Returns when the unit is finished, or `lease` is found lost."""
        saved, progress = time.monotonic(), self.progress
        started = saved - progress["seconds"]
        bar.total = bar.total and max(1, bar.total - progress["read"])
        try:
            blocks = itertools.islice(self.source.blocks(self.number), progress["blocks"], None)
            for chunk, (tokens, counts) in workers.results(blocks):
                bar.show(chunk[-1].done - progress["read"], len(tokens))
                self._write(tokens, counts)
                progress.update(
                    blocks=progress["blocks"] + len(chunk),
                    read=chunk[-1].done,
                    seconds=time.monotonic() - started,
                )
                if time.monotonic() - saved >= save_seconds:
                    if not lease.is_held():
                        return
                    self._save()
                    saved = time.monotonic()
            self._finish(lease)
        finally:
            for store in self.stores.values():
                store.close()

    def _write(self, tokens, counts):
        """Deals documents out to the stores by their number."""
        eos, progress = self.tokenizer.eos, self.progress
        for name, count in counts.items():
            progress["counts"][name] += count
        if (
            len(tokens)
            and tokens[0] == eos
            and not progress["open"]
            and self.source.options.pack == "document"
        ):
            tokens = tokens[1:]  # the document that this would end has ended already
        if not len(tokens):
            return
        ends = np.flatnonzero(tokens == eos) + 1
        progress["open"] = bool(tokens[-1] != eos)
        bounds = np.append(ends, len(tokens)) if progress["open"] else ends
        held_out = for_validation(
            self.number * NUMBERS + progress["written"] + np.arange(len(bounds)),
            self.source.options.validation_fraction,
        )
        progress["written"] += len(ends)
        if held_out.any():
            of_token = np.repeat(held_out, np.diff(bounds, prepend=0))
            self.stores["validation"].append(tokens[of_token])
            tokens = tokens[~of_token]
        next(iter(self.stores.values())).append(tokens)

    def _save(self):
        self.progress["stores"] = {name: store.state() for name, store in self.stores.items()}
        write_atomically(self.path.with_suffix(".begun"), json.dumps(self.progress))

    def _finish(self, lease):
        self.progress["written"] += self.progress["open"]  # an end that was not put there
        shards = {name: store.finish_shards() for name, store in self.stores.items()}
        if lease.is_held():
            write_atomically(
                self.path.with_suffix(".json"), json.dumps({**self.progress, "stores": shards})
            )
            self.path.with_suffix(".begun").unlink(missing_ok=True)


def exact(fraction: float | Fraction) -> Fraction:
    return Fraction(fraction).limit_denominator(10**6)


def for_validation(numbers: np.ndarray, fraction: float | Fraction) -> np.ndarray:
    """Which documents are held out, (n,) bool, by their running `numbers` (n,): exactly one of each 1/fraction.

    A hash of the group's number chooses within it, so that the choice has no period that the input could share.
    """
    if not fraction:
        return np.zeros(len(numbers), dtype=bool)
    p, q = exact(fraction).as_integer_ratio()
    group = numbers * p // q
    first, end = -(-group * q // p), -(-(group + 1) * q // p)
    chosen = (splitmix64(np.uint64(0), group) % (end - first).astype(np.uint64)).astype(np.int64)
    return numbers == first + np.maximum(
        chosen, group == 0
    )  # never the first: training needs one, too


class Progress(Console):
    """What this process does: a live line on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, source: TextSource, units: int):
        """units: that it sets out to do."""
        super().__init__()
        self.total = source.total and min(source.total, units * source.unit_size)
        self.started = self.printed = time.monotonic()
        self.read, self.tokens = 0.0, 0

    def show(self, read: float, tokens: int) -> None:
        """What was read, in the measure of the source's total, and made of it since the last call."""
        self.read, self.tokens, now = self.read + read, self.tokens + tokens, time.monotonic()
        share = max(0, min(1, self.read / self.total)) if self.total else 0
        left = f", {duration((now - self.started) * (1 / share - 1))} left" if share else ""
        text = (
            f"{f'{share:4.0%}  ' if self.total else ''}{self.tokens:,} tokens, "
            f"{self.tokens / max(now - self.started, 1e-9):,.0f} tokens/s{left}"
        )
        self.passing(text)
        if not self.live and now - self.printed >= 10:
            self.line(text)
            self.printed = now
