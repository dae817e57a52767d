"""get_dataset.py: from what INPUT names to token stores, by any number of processes on any number of machines.

    OUT/train/  OUT/validation/        token stores
    OUT/dataset.json                   what made them; written last
    OUT/.progress/begun.json           while unfinished: what makes them
    OUT/.progress/1-of-4/              of each part: train/, validation/, tokenizer/ and ...
    OUT/.progress/1-of-4/state.json    ... how far it is

Each part writes shards of its own; who ends last puts them together (merging.py). The stores' bytes depend on the input,
the settings and the number of parts, not on being killed.
"""

import contextlib
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np

from mamba_fsdp.data import tokenizer as tokenizers_
from mamba_fsdp.data.corpus import Shard, describe, find_shards
from mamba_fsdp.data.merging import exact, merge, part_writer
from mamba_fsdp.data.reading import START, Batch, read_batches
from mamba_fsdp.data.sampler import splitmix64
from mamba_fsdp.data.store import SHARDS, TokenStore
from mamba_fsdp.errors import UserError
from mamba_fsdp.lease import Lease
from mamba_fsdp.report.console import Console, output_that_may_go
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage import DATASET, read_object, write_object

BATCH_SIZE = (1 << 20) * max(1, len(os.sched_getaffinity(0)) // 4)  # characters encoded at once
BATCHES_AHEAD = 2  # one in the library, the one before it becomes an array
TRAINING_SAMPLE = 32 << 20  # characters of text that a tokenizer is trained on
SAVE_SECONDS = 10.0  # of work that a kill can lose
SAMPLED_SHARDS = 64  # at most, that these come from
PROGRESS = ".progress"
BEGUN = f"{PROGRESS}/begun.json"
START_AGAIN = "start again with --overwrite, or remove it by hand"
# The stores depend on the other options.
NOT_RECORDED = ("format", "part", "overwrite")
NUMBERS = 1 << 40  # between the numbers of the first documents of two parts


@dataclass
class PartState:
    """How far a part is. Saved when its stores are flushed, so that another process resumes from it."""

    position: dict[str, int] = field(default_factory=START.copy)  # in the input, see reading.py
    written: int = 0  # documents ended
    is_open: bool = False  # the last document goes on
    empty: int = 0  # documents without a token, left out
    stores: dict[str, Any] = field(default_factory=dict)  # of each its StoreWriter's state
    finished: bool = False

    @classmethod
    def load(cls, folder: Path) -> "PartState":
        """The state of the part in `folder`. Raises UserError where it is damaged."""
        stores = {"": {"shards": SHARDS, "tokens": 0, "documents": 0, "open": 0}}
        example = {"position": START, "written": 0, "empty": 0, "stores": stores}
        path = folder / "state.json"
        try:
            return cls(**read_object(path, example, START_AGAIN))
        except FileNotFoundError:
            return cls()
        except TypeError as error:
            raise UserError(f"{path}: {error}; {START_AGAIN}") from error

    def save(self, folder: Path) -> None:
        write_object(folder / "state.json", asdict(self))


@output_that_may_go()
def make_dataset(input: str, out: str | Path, options: DatasetConfig) -> dict | None:
    """Makes token stores in OUT of what `input` names, as the options say; resumes where earlier calls stopped.

    Returns dataset.json's content, None where other parts have yet to end. Raises UserError for bad input, and for what
    can't be written.
    """
    out = Path(out)
    shards = find_shards(input, options)
    settings = {name: value for name, value in asdict(options).items() if name not in NOT_RECORDED}
    settings["input"] = describe(shards)
    try:
        _prepare(out, options.overwrite)
        return _complete(out, settings) or _Part(out, shards, options, settings).run()
    except OSError as error:
        place = error.filename or out
        raise UserError(
            f"{place}: can't be written ({error.strerror}); fix that, then the same command resumes"
        ) from error
    except KeyboardInterrupt:
        print(f"\n{out} is unfinished; the same command resumes from here", file=sys.stderr)
        raise


def _prepare(out, overwrite):
    """Makes OUT, and removes an earlier dataset in it if told so. Raises UserError where something else is in its
    place."""
    out.mkdir(parents=True, exist_ok=True)
    is_ours = (out / "dataset.json").exists() or (out / PROGRESS).exists()
    if not is_ours and any(out.iterdir()):
        raise UserError(f"{out}: not empty and not made by this program; choose another folder")
    if overwrite:
        for name in ("train", "validation", "test", PROGRESS):
            shutil.rmtree(out / name, ignore_errors=True)
        (out / "dataset.json").unlink(missing_ok=True)  # last: by it what is left is known as ours


def _complete(out, settings):
    """The content of dataset.json, None where there is none yet. Raises UserError where it is of other settings."""
    done = _recorded(out, "dataset.json", settings)
    if done is None:
        return None
    DATASET.check(out / "dataset.json", done)
    for path in out.glob("*/index.json"):
        TokenStore(path.parent)
    # Of a process that was killed at the very end.
    shutil.rmtree(out / PROGRESS, ignore_errors=True)
    print(f"{out} is complete already; nothing to do")
    return done


def _recorded(out, name, settings):
    """What a file in OUT says, None where it is not there. Raises UserError where it says other settings than these."""
    try:
        found = read_object(out / name, {"settings": {"input": {}}}, START_AGAIN)
    except FileNotFoundError:
        return None
    before = found["settings"]
    for name, now in settings.items():
        was = before.get(name) or ""
        if name in before and was != (now or ""):
            raise UserError(
                f"{out} holds other data: {name} was {was} and is {now}; choose another folder, or "
                "--overwrite it"
            )
    return found


@dataclass
class _Part:
    """One part of the work, and the end of all of it if the other parts have ended."""

    out: Path
    shards: list[Shard]
    options: DatasetConfig
    settings: dict

    def __post_init__(self) -> None:
        self.number, self.count = self.options.part_of()
        progress = self.out / PROGRESS
        self.folders = [progress / f"{part}-of-{self.count}" for part in range(self.count)]
        self.folder = self.folders[self.number]
        self.held_out = self.options.validation_fraction
        self.stores = sorted({shard.store for shard in self.shards})
        if self.options.splits == "official":
            self.held_out = 0
        elif self.held_out:
            self.stores.append("validation")

    def run(self) -> dict | None:
        """Returns dataset.json's content if all parts have ended."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lease = Lease(self.out / PROGRESS / f"{self.folder.name}.lease")
        lease.take(print, "wait for it, or choose another folder")
        with contextlib.closing(lease):
            tokenizer = self._tokenizer()
            self._check_others(tokenizer)
            self.state = PartState.load(self.folder)
            if not self.state.finished:
                self._tokenize(tokenizer, lease)
        states = [PartState.load(folder) for folder in self.folders]
        left = [state for state in states if not state.finished]
        if not left:
            return self._merge(states, tokenizer)
        done = _complete(self.out, self.settings)  # by a part that ended just before this one
        if not done:
            print(
                f"part {self.number} is finished; {len(left)} more have to finish to complete {self.out}"
            )
        return done

    def _merge(self, states, tokenizer):
        """Puts all parts together, or waits until another part's process has done it."""
        lease = Lease(self.out / PROGRESS / "merge.lease")
        with contextlib.closing(lease):
            while not (self.out / "dataset.json").exists():
                with contextlib.suppress(
                    FileNotFoundError
                ):  # the other process removes the folder at its end
                    if lease.try_take():
                        break
                    lease.shows_life()
            done = _complete(self.out, self.settings)
            if done:
                return done
            if describe(self.shards) != self.settings["input"]:
                raise UserError(f"{self.out}: the input changed while it was read; {START_AGAIN}")
            parts = list(zip(self.folders, states))
            done = merge(self.out, parts, tokenizer, self.options, self.settings)
            shutil.rmtree(self.out / PROGRESS, ignore_errors=True)
            return done

    def _check_others(self, tokenizer):
        """Raises UserError where this or another part was begun otherwise than this one is now."""
        settings = {
            **self.settings,
            "parts": self.count,
            "tokenizer_identity": tokenizer.identity,
        }
        if not _recorded(self.out, BEGUN, settings):
            write_object(self.out / BEGUN, {"settings": settings})

    def _tokenizer(self):
        """As the options say. One that is trained is saved in the part's folder; each part trains it alike."""
        options = self.options
        folder = self.folder / "tokenizer"
        if options.tokenizer == "none":
            return tokenizers_.NoTokenizer(options.eos_token, options.vocab_size)
        size = tokenizers_.training_size(options.tokenizer)
        if not size:
            return tokenizers_.load(options.tokenizer, options.eos_token)
        eos_token = options.eos_token or tokenizers_.END_OF_TEXT
        if not (folder / "tokenizer.json").exists():
            print(f"training a tokenizer of {size} tokens", flush=True)
            began = time.monotonic()
            shards = [shard for shard in self.shards if shard.store == "train"]
            texts = _sample(shards, options)
            # In a thread of its own: the library is deaf to Ctrl-C.
            training = ThreadPool(1).apply_async(tokenizers_.train, (texts, size, eos_token))
            console = Console()
            while not training.ready():
                training.wait(0.2)
                console.passing(f"  {time.monotonic() - began:.0f} s so far")
            console.clear()
            training.get().save(folder)
        return tokenizers_.load(str(folder / "tokenizer.json"), eos_token)

    def _tokenize(self, tokenizer, lease):
        state = self.state
        self.eos = tokenizer.eos
        self.writers = {}
        for name in self.stores:
            resumed = state.stores.get(name, {})
            self.writers[name] = part_writer(self.folder / name, tokenizer, self.options, resumed)
        part = (self.number, self.count)
        batches = read_batches(self.shards, self.options, BATCH_SIZE, part, state.position)
        started = saved = time.monotonic()
        console = Console()
        tokens = 0
        before = 0
        for store in state.stores.values():
            before += store["tokens"] + sum(shard["tokens"] for shard in store["shards"])
        if before:
            print(f"resumes behind {before:,} tokens", flush=True)
        console.passing("reading ...")
        try:
            for batch, ids in encode(batches, tokenizer, self.options):
                if not state.written and self.options.pack == "document":
                    _tell_of_blocks(batch)
                self._write(batch, ids)
                tokens += len(ids)
                now = time.monotonic()
                rate = tokens / (now - started)
                told = (
                    f"file {batch.position['shard'] + 1:,} of {batch.shards:,}: "
                    f"{before + tokens:,} tokens, {rate:,.0f} tokens/s"
                )
                console.passing(told)
                if now - saved >= SAVE_SECONDS:
                    self._save(lease)
                    saved = now
                    if not console.live:
                        console.line(told)
            for writer in self.writers.values():
                writer.finish_shards()
            state.finished = True
            self._save(lease)
        finally:
            console.clear()
            for writer in self.writers.values():
                writer.close()

    def _write(self, batch: Batch, tokens: np.ndarray) -> None:
        """Deals the documents of a batch out to the stores. tokens: (n,), each eos of which ends a document."""
        state = self.state
        state.position = batch.position
        is_end = tokens == self.eos
        if self.options.pack == "document":
            ends_nothing = is_end & np.append(not state.is_open, is_end)[:-1]
            state.empty += int(ends_nothing.sum())
            tokens = tokens[~ends_nothing]
            is_end = is_end[~ends_nothing]
        if not len(tokens):
            return
        bounds = np.flatnonzero(is_end) + 1
        first = self.number * NUMBERS + state.written
        state.written += len(bounds)
        state.is_open = not is_end[-1]
        if state.is_open:
            bounds = np.append(bounds, len(tokens))
        numbers = first + np.arange(len(bounds))
        held_out = for_validation(numbers, self.held_out)
        if held_out.any():
            is_held_out = np.repeat(held_out, np.diff(bounds, prepend=0))
            self.writers["validation"].append(tokens[is_held_out])
            tokens = tokens[~is_held_out]
        self.writers[batch.store].append(tokens)

    def _save(self, lease):
        """Makes what was written durable, and then the state that says so."""
        self.state.stores = {name: writer.state() for name, writer in self.writers.items()}
        if not lease.is_held():
            raise UserError(
                f"{self.out}: this process was suspended, and another took over its part"
            )
        self.state.save(self.folder)


def _tell_of_blocks(batch):
    """Says what to do where rows of token ids look as if a long text had been cut into blocks."""
    lengths = {len(document.content) for document in batch.documents}
    is_text = any(isinstance(document.content, str) for document in batch.documents)
    if len(batch.documents) > 1 and len(lengths) == 1 and not is_text:
        print(
            f"every row has {lengths.pop():,} tokens, like blocks of one long text: --pack=none lays those end to end, "
            "without an eos between"
        )


def encode(
    batches: Iterable[Batch], tokenizer: tokenizers_.TextTokenizer, options: DatasetConfig
) -> Iterator[tuple[Batch, np.ndarray]]:
    """Yields (batch, its ids (n,) int64). Raises UserError for text without a tokenizer."""
    ahead: deque[Future] = deque()
    threads = ThreadPoolExecutor(BATCHES_AHEAD)
    try:
        for batch in batches:
            ahead.append(threads.submit(_encoded, batch, tokenizer, options))
            if len(ahead) > BATCHES_AHEAD:
                yield ahead.popleft().result()
        for one in ahead:
            yield one.result()
    finally:  # after Ctrl-C too, which waits for nothing
        threads.shutdown(wait=False, cancel_futures=True)


def _encoded(batch, tokenizer, options):
    texts = [each.content for each in batch.documents if isinstance(each.content, str)]
    encoded = iter(tokenizer.encode_documents(texts))
    adds_eos = options.pack == "document"
    separators = [*tokenizer.separators, *map(int, options.strip_tokens)]
    parts = [np.zeros(0, np.int64)]
    for document in batch.documents:
        ids = document.content
        if isinstance(ids, str):
            ids = np.array(next(encoded), dtype=np.uint32)
            # Of vocabularies that hold the eos as a plain word: it must not cut the document.
            ids = ids[ids != tokenizer.eos]
        elif adds_eos:
            ids = _stripped(document, separators)
        parts.append(ids)
        if document.ends and adds_eos:
            parts.append(np.array([tokenizer.eos]))
    return batch, np.concatenate(parts)


def _stripped(document, separators):
    """Its ids without the separators that stand at its ends."""
    ids = document.content
    others = np.flatnonzero(~np.isin(ids, separators))
    if not len(others):
        return ids[:0]
    if document.ends:
        ids = ids[: others[-1] + 1]
    if document.begins:
        ids = ids[others[0] :]
    return ids


def for_validation(numbers: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents are held out, (n,) bool, by their running `numbers` (n,): exactly one of each 1/fraction.

    A hash of the group's number chooses within it, so that the choice has no period that the input could share.
    """
    if not fraction:
        return np.zeros(len(numbers), dtype=bool)
    p, q = exact(fraction).as_integer_ratio()
    group = numbers * p // q
    first = -(-group * q // p)
    end = -(-(group + 1) * q // p)
    chosen = (splitmix64(np.uint64(0), group) % (end - first).astype(np.uint64)).astype(np.int64)
    # Never the first of all: training needs one, too.
    return numbers == first + np.maximum(chosen, group == 0)


def _sample(shards: list[Shard], options: DatasetConfig) -> Iterator[str]:
    """Texts from the whole breadth of what is trained on, about TRAINING_SAMPLE characters."""
    groups = [shards]
    if describe(shards).get("bytes", 0) > TRAINING_SAMPLE:
        count = min(len(shards), SAMPLED_SHARDS)
        groups = [[shards[number * len(shards) // count]] for number in range(count)]
    for group in groups:
        left = TRAINING_SAMPLE // len(groups)
        for batch in read_batches(group, options, 1 << 16):
            for content, *_ in batch.documents:
                if not isinstance(content, str):
                    raise UserError(
                        f"{group[0].name}: holds token ids; name the tokenizer that made them with "
                        "--tokenizer, or give --tokenizer=none"
                    )
                left -= len(content)
                yield content
            if left <= 0:
                break
