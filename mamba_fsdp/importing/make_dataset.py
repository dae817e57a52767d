"""Makes token stores of an input, for get_dataset.py, with any number of processes on any number of machines.

    OUT/train/  OUT/validation/        token stores
    OUT/dataset.json                   the settings that made them; written last
    OUT/.progress/begun.json           while unfinished: the settings that make them
    OUT/.progress/1-of-4/              of each part: train/, validation/, tokenizer/ and ...
    OUT/.progress/1-of-4/state.json    ... how far it is

Each part writes files of its own; the part that ends last merges them (merging.py). The stores' bytes depend on the
input, the settings and the number of parts, not on whether a process was killed.
"""

import contextlib
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mamba_fsdp.data import tokenizer as tokenizers_
from mamba_fsdp.data.store import StoreWriter, TokenStore, WriterState
from mamba_fsdp.data.tokenizer import NoTokenizer, TextTokenizer
from mamba_fsdp.errors import UserError
from mamba_fsdp.importing.holding_out import Holdout
from mamba_fsdp.importing.inputs import Document, InputFile, describe, find_files
from mamba_fsdp.importing.kinds import (
    BEGUN,
    DATASET,
    PROGRESS,
    LeftOut,
    stores_in,
)
from mamba_fsdp.importing.losses import check_losses
from mamba_fsdp.importing.merging import merge, writer_of
from mamba_fsdp.importing.progress import (
    START_AGAIN,
    STATE,
    Pace,
    PartState,
    records_settings,
    resolved,
    state_in,
    write_settings,
)
from mamba_fsdp.importing.reading import (
    DocumentBatch,
    Share,
    check_content,
    read_batches,
)
from mamba_fsdp.reporting.console import Console
from mamba_fsdp.run.lease import Lease
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.retry import (
    delete,
    exists,
    list_names,
    make_folder,
    retry_io,
)
from mamba_fsdp.storage.threads import in_thread
from mamba_fsdp.storage.typed_json import write_object

BATCH_SIZE = (1 << 20) * max(1, len(os.sched_getaffinity(0)) // 4)  # characters encoded at once
BATCHES_AHEAD = 2  # one is encoded while the one before becomes an array
TRAINING_SAMPLE = 32 << 20  # characters of text that a tokenizer is trained on
SAVE_SECONDS = 10.0  # a kill loses this much work at most
START = 4096  # characters of a text that tell whether the tokenizer loses some
SAMPLED_FILES = 64  # the most that a tokenizer's sample comes from
# Options that have no effect on the stores.
NOT_RECORDED = ("format", "part", "overwrite", "skip_unreadable", "lossy_tokenizer")
IN_USE = "wait for it, or choose another folder"


def make_dataset(input: str, out: str | Path, options: DatasetConfig) -> bool:
    """Makes token stores in OUT of an input, as the options demand; resumes what earlier calls left.

    Returns whether OUT is complete; it is not while other parts have yet to end. Raises UserError for bad input, and
    for files that can't be written.
    """
    out = Path(out)
    left_out = LeftOut()
    files = find_files(input, options, left_out)
    settings = {name: value for name, value in asdict(options).items() if name not in NOT_RECORDED}
    settings["input"] = describe(files)
    settings["tokenizer"] = resolved(options.tokenizer)
    try:
        _prepare(out, options.overwrite)
        if _is_complete(out, settings):
            return True
        if input == "builtin":
            print(f"making {out} from the source of a Python library, for a first try", flush=True)
        return _Part(out, files, left_out, options, settings).run()
    except OSError as error:
        raise UserError(
            f"{out}: can't be written ({error.strerror}); fix that, then the same command resumes"
        ) from error
    except KeyboardInterrupt:
        print(f"\n{out} is unfinished; the same command resumes from here", file=sys.stderr)
        raise


def _prepare(out: Path, overwrite: bool) -> None:
    """Makes OUT, and removes an earlier dataset in it if asked to. Raises UserError if OUT contains something else, or an
    import that is running."""
    make_folder(out, parents=True)
    is_dataset = exists(out / DATASET) or exists(out / PROGRESS)
    if not is_dataset and list_names(out):
        raise UserError(f"{out}: not empty and not made by this program; choose another folder")
    if not overwrite:
        return
    with contextlib.ExitStack() as leases:
        for file in (out / PROGRESS).glob("*.lease"):
            lease = leases.enter_context(contextlib.closing(Lease(file)))
            lease.acquire(print, IN_USE)
        for name in ("train", "validation", "test", PROGRESS):
            delete(out / name)
        # Last: after a kill before this, it shows that the rest is a dataset.
        retry_io(partial((out / DATASET).unlink, missing_ok=True), out)


def _is_complete(out: Path, settings: dict[str, Any]) -> bool:
    """Returns whether OUT contains all that these settings make. Raises UserError if it was made with other settings."""
    if not records_settings(out / DATASET, settings):
        return False
    for name in stores_in(out):
        TokenStore(out / name)
    # A process that was killed just before its end left it.
    delete(out / PROGRESS)
    print(f"{out} is complete already; nothing to do")
    return True


@dataclass
class _Part:
    """One part of the work, and the merge if all other parts have ended."""

    out: Path
    files: list[InputFile]  # the files of the whole input
    left_out: LeftOut
    options: DatasetConfig
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        self.number, self.count = self.options.part_of()
        self.begun = {**self.settings, "parts": self.count}  # what BEGUN records
        self.share = Share.of_part(self.files, self.number, self.count)
        progress = self.out / PROGRESS
        self.folders = [progress / f"{part}-of-{self.count}" for part in range(self.count)]
        self.folder = self.folders[self.number]
        self.stores = sorted({file.store for file in self.files})
        self.holdout = None
        fraction = self.options.validation_fraction
        if self.options.splits == "held_out" and fraction:
            self.holdout = Holdout(fraction, self.settings["input"], self.number)
            self.stores.append("validation")
        self.state = PartState()
        self.writers: dict[str, StoreWriter] = {}

    def run(self) -> bool:
        """Runs this part. Returns whether all parts have ended."""
        make_folder(self.folder, parents=True)
        lease = Lease(self.out / PROGRESS / f"{self.folder.name}.lease")
        lease.acquire(print, IN_USE)
        with contextlib.closing(lease):
            has_begun = self._has_begun()
            if not self.options.skip_unreadable:
                check_content(self.share.files, self.options.encoding)
            tokenizer = self._tokenizer(has_begun)
            self.begun["tokenizer_identity"] = tokenizer.identity
            self._has_begun()
            self.state = state_in(self.folder)
            if not self.state.finished:
                self._tokenize(tokenizer, lease)
        states = [state_in(folder) for folder in self.folders]
        unfinished = [str(number) for number, state in enumerate(states) if not state.finished]
        if not unfinished:
            self._merge(states, tokenizer)
            return True
        if _is_complete(self.out, self.settings):  # another part that ended just now has merged
            return True
        print(
            f"part {self.number} is finished; to complete {self.out}, these have to finish: {', '.join(unfinished)}"
        )
        return False

    def _has_begun(self) -> bool:
        """Returns whether an import with these settings has saved something in OUT. Raises UserError if one with others
        has."""
        return records_settings(
            self.out / BEGUN,
            self.begun,
            "the command that began it resumes it if the input and the tokenizer are as they were; to begin anew, "
            f"remove {self.out}, or give --overwrite",
        )

    def _merge(self, states: list[PartState], tokenizer: TextTokenizer) -> None:
        """Merges all parts, or waits until another part's process has done it."""
        lease = Lease(self.out / PROGRESS / "merge.lease")
        with contextlib.closing(lease):
            while not exists(self.out / DATASET):
                # The other process removes the lease's folder at its end.
                with contextlib.suppress(FileNotFoundError):
                    if lease.try_acquire():
                        break
                    lease.is_renewed()
            if _is_complete(self.out, self.settings):
                return
            if describe(self.files) != self.settings["input"]:
                raise UserError(f"{self.out}: the input changed while it was read; {START_AGAIN}")
            parts = list(zip(self.folders, states))
            merge(self.out, parts, tokenizer, self.options, self.settings, self.left_out)
            delete(self.out / PROGRESS)

    def _tokenizer(self, has_begun: bool) -> TextTokenizer:
        """Returns the tokenizer that the options ask for. One that is trained is saved in the part's folder; each part
        trains an equal one."""
        options = self.options
        if options.tokenizer == "none":
            return NoTokenizer(options.eos_token, options.vocab_size)
        size = tokenizers_.training_size(options.tokenizer)
        if size:
            return self._trained_tokenizer(size, has_begun)
        tokenizer = tokenizers_.load(options.tokenizer, options.eos_token)
        for line in (tokenizer.without_dropout(), tokenizer.settle_bos(options.bos)):
            if line:
                print(line, flush=True)
        check_losses(tokenizer, _starts(self.files, options), options.lossy_tokenizer)
        return tokenizer

    def _trained_tokenizer(self, size: int, has_begun: bool) -> TextTokenizer:
        """Returns a tokenizer that is trained on a sample of the input, or the one that this import has trained before."""
        eos_token = self.options.eos_token or tokenizers_.END_OF_TEXT
        folder = self.folder / "tokenizer"
        if not has_begun or not exists(folder / "tokenizer.json"):
            print(f"training a tokenizer of {size} tokens on a sample of the text", flush=True)
            files = [file for file in self.files if file.store == "train"]
            # The library ignores Ctrl-C, so it gets a thread of its own.
            training = in_thread(
                tokenizers_.train, _training_texts(files, self.options), size, eos_token
            )
            while not training.done():
                wait([training], timeout=0.2)
            training.result().save(folder)
        return tokenizers_.load(str(folder / "tokenizer.json"), eos_token)

    def _tokenize(self, tokenizer: TextTokenizer, lease: Lease) -> None:
        """Reads this part's share of the input and writes its stores, starting from `state`."""
        state = self.state
        for name in self.stores:
            written = state.stores.setdefault(name, WriterState())
            self.writers[name] = writer_of(self.folder / name, tokenizer, self.options, written)
        self.share.unreadable = state.unreadable
        pace = Pace(self.share.files)
        # Readers of token ids know the eos by its id alone.
        options = replace(
            self.options, eos_token=str(tokenizer.eos), vocab_size=tokenizer.vocab_size
        )
        batches = read_batches(self.share, options, BATCH_SIZE, state.position)
        console = Console()
        tokens_before = sum(written.total() for written in state.stores.values())
        if tokens_before:
            print(f"resuming after {tokens_before:,} tokens", flush=True)
        console.show_progress("reading ...")
        tokens = 0
        started = time.monotonic()
        saved = started
        try:
            for batch, ids in encode(batches, tokenizer, self.options):
                self._write(batch, ids, tokenizer)
                tokens += len(ids)
                moment = time.monotonic()
                rate = tokens / (moment - started)
                message = (
                    f"file {batch.position.file + 1:,} of {len(self.share.files):,}: "
                    f"{tokens_before + tokens:,} tokens, {rate:,.0f} tokens/s"
                    f"{pace.describe(batch.position.file)}"
                )
                console.show_progress(message)
                if moment - saved >= SAVE_SECONDS:
                    self._save(lease)
                    saved = moment
                    if not console.has_live_line:
                        console.print_line(message)
            for writer in self.writers.values():
                writer.finish_files()
            state.finished = True
            self._save(lease)
        finally:
            console.clear()

    def _write(self, batch: DocumentBatch, tokens: np.ndarray, tokenizer: TextTokenizer) -> None:
        """Distributes the documents of a batch over the stores. tokens: (n,), each eos ends a document."""
        state = self.state
        state.position = batch.position
        state.counts = dict(Counter(state.counts) + batch.counts)
        state.fault = state.fault or batch.fault
        is_end = tokens == tokenizer.eos
        if self.options.pack == "document":
            is_open = any(writer.state.open_tokens for writer in self.writers.values())
            ends_nothing = is_end & np.append(not is_open, is_end)[:-1]
            state.empty += int(ends_nothing.sum())
            tokens = tokens[~ends_nothing]
            is_end = is_end[~ends_nothing]
        if not len(tokens):
            return
        if self.holdout is None:
            self.writers[batch.store].append(tokens)
            return
        ends = np.flatnonzero(is_end) + 1
        if not is_end[-1]:
            ends = np.append(ends, len(tokens))
        starts, held_out = self.holdout.choose(ends, state.tokens, state.open_tokens)
        changes = np.flatnonzero(held_out[1:] != held_out[:-1]) + 1
        is_held_out = bool(held_out[0])
        for stretch in np.split(tokens, starts[changes]):
            self._append("validation" if is_held_out else batch.store, stretch)
            is_held_out = not is_held_out
        state.tokens += len(tokens)
        last = np.append(-state.open_tokens, ends)[-2]  # the start of the last document
        state.open_tokens = 0 if is_end[-1] else int(len(tokens) - last)

    def _append(self, store: str, tokens: np.ndarray) -> None:
        """Appends tokens to a store, and ends the document that another store has begun."""
        for name, writer in self.writers.items():
            if name != store and writer.whole and writer.state.open_tokens:
                writer.append([writer.eos])
        self.writers[store].append(tokens)

    def _save(self, lease: Lease) -> None:
        """Makes what was written durable, then records it in the state."""
        for writer in self.writers.values():
            writer.flush()
        lease.check()
        if not self._has_begun():
            write_settings(self.out / BEGUN, self.begun)
        write_object(self.folder / STATE, asdict(self.state))


def encode(
    batches: Iterable[DocumentBatch], tokenizer: TextTokenizer, options: DatasetConfig
) -> Iterator[tuple[DocumentBatch, np.ndarray]]:
    """Yields (batch, its ids (n,) int64). Raises UserError for text without a tokenizer."""
    ahead: deque[Future] = deque()
    threads = ThreadPoolExecutor(BATCHES_AHEAD)
    try:
        for batch in batches:
            ahead.append(threads.submit(_encoded, batch, tokenizer, options))
            if len(ahead) > BATCHES_AHEAD:
                yield ahead.popleft().result()
        for future in ahead:
            yield future.result()
    finally:  # does not wait for the threads, so that Ctrl-C ends at once
        threads.shutdown(wait=False, cancel_futures=True)


def _encoded(
    batch: DocumentBatch, tokenizer: TextTokenizer, options: DatasetConfig
) -> tuple[DocumentBatch, np.ndarray]:
    texts = [each.content for each in batch.documents if isinstance(each.content, str)]
    encoded = iter(tokenizer.encode_documents(texts))
    adds_eos = options.pack == "document"
    separators = [*tokenizer.separators, *map(int, options.strip_tokens)]
    pieces: list[np.ndarray] = [np.zeros(0, np.int64)]
    for document in batch.documents:
        ids = document.content
        if isinstance(ids, str):
            ids = np.array(next(encoded), dtype=np.uint32)
            # A vocabulary can contain the eos as a plain token: it must not cut the document.
            ids = ids[ids != tokenizer.eos]
        elif adds_eos:
            ids = _stripped(ids, document, separators)
        pieces.append(ids)
        if document.ends and adds_eos:
            pieces.append(np.array([tokenizer.eos]))
    return batch, np.concatenate(pieces)


def _stripped(ids: np.ndarray, document: Document, separators: list[int | None]) -> np.ndarray:
    """Returns a document's ids without the separators at its ends."""
    start = 0
    end = len(ids)
    while document.begins and start < end and ids[start] in separators:
        start += 1
    while document.ends and start < end and ids[end - 1] in separators:
        end -= 1
    return ids[start:end]


def _training_texts(files: list[InputFile], options: DatasetConfig) -> Iterator[str]:
    """Yields the texts that a tokenizer is trained on. Raises UserError for token ids."""
    for content in _sample(files, options, TRAINING_SAMPLE):
        if not isinstance(content, str):
            raise UserError(
                "the input contains token ids; name the tokenizer that made them with --tokenizer, or give "
                "--tokenizer=none --eos_token=ID --vocab_size=N"
            )
        yield content


def _starts(files: list[InputFile], options: DatasetConfig) -> Iterator[str]:
    """Yields the starts of some texts."""
    for content in _sample(files, options, SAMPLED_FILES * START):
        if isinstance(content, str):
            yield content[:START]


def _sample(files: list[InputFile], options: DatasetConfig, size: int) -> Iterator[Any]:
    """Yields texts or token ids, about `size` characters or tokens, from up to SAMPLED_FILES files of the whole breadth of
    a larger input."""
    groups = [files]
    if describe(files).get("bytes", 0) > size:
        count = min(len(files), SAMPLED_FILES)
        groups = [[files[number * len(files) // count]] for number in range(count)]
    for group in groups:
        left = size // len(groups)
        for batch in read_batches(Share(group), options, min(left, 1 << 16)):
            for document in batch.documents:
                left -= len(document.content)
                yield document.content
            if left <= 0:
                break
