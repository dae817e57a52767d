"""Converts an input to token stores, with one or more processes on one or more machines. get_dataset.py uses it.

    OUT/train/  OUT/validation/        the token stores
    OUT/dataset.json                   the settings of the import; written last
    OUT/.progress/begun.json           the settings of an unfinished import
    OUT/.progress/1-of-4/              the files of one part: train/, validation/, tokenizer/
    OUT/.progress/1-of-4/state.json    the progress of this part

Each part of the work writes its own files. The last part to finish merges them (merging.py). The bytes of the stores depend
only on the input, the settings and the number of parts, even if a process was killed and resumed.
"""

import contextlib
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mamba_fsdp.data import tokenizer as tokenizer_lib
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
    has_settings,
    read_part_state,
    resolve_path,
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

BATCH_SIZE = (1 << 20) * max(1, len(os.sched_getaffinity(0)) // 4)  # characters to encode at a time
BATCHES_AHEAD = 2  # one batch is encoded while the previous one is converted to an array
TRAINING_SAMPLE = 32 << 20  # characters of text to train a tokenizer on
SAVE_SECONDS = 10.0  # a killed process loses at most this much work
SAMPLE_LENGTH = 4096  # characters of each text in the sample for check_losses
SAMPLED_FILES = 64  # the maximal number of files in a sample
# Options that do not affect the stores.
NOT_RECORDED = ("format", "part", "overwrite", "skip_unreadable", "lossy_tokenizer")
IN_USE = "wait for it, or choose another folder"


def make_dataset(input: str, out: str | Path, options: DatasetConfig) -> bool:
    """Converts an input to token stores in the folder `out`. Resumes the work of earlier calls.

    Returns whether `out` is complete. It is not complete until all parts have finished. Raises UserError if the input can't be
    read or the output can't be written.
    """
    out = Path(out)
    left_out = LeftOut()
    files = find_files(input, options, left_out)
    settings = {name: value for name, value in asdict(options).items() if name not in NOT_RECORDED}
    settings["input"] = describe(files)
    settings["tokenizer"] = resolve_path(options.tokenizer)
    try:
        _prepare(out, options.overwrite)
        if _is_complete(out, settings):
            return True
        if input == "builtin":
            print(
                f"making {out} from the source files of Python's standard library, for a first try",
                flush=True,
            )
        return _Part(out, files, left_out, options, settings).run()
    except OSError as error:
        raise UserError(
            f"{out}: can't be written ({error.strerror}); fix this, then run the same command to resume"
        ) from error
    except KeyboardInterrupt:
        print(f"\n{out} is unfinished; the same command resumes from here", file=sys.stderr)
        raise


def _prepare(out: Path, overwrite: bool) -> None:
    """Creates the folder `out`. With `overwrite`, removes an earlier dataset in it.

    Raises UserError if the folder is not empty and contains neither a dataset nor an unfinished import. With `overwrite`, also
    raises UserError if an import into the folder is running."""
    make_folder(out, parents=True)
    is_dataset = exists(out / DATASET) or exists(out / PROGRESS)
    if not is_dataset and list_names(out):
        raise UserError(
            f"{out} is not empty and was not made by this program; choose another folder"
        )
    if not overwrite:
        return
    with contextlib.ExitStack() as leases:
        for file in (out / PROGRESS).glob("*.lease"):
            lease = leases.enter_context(contextlib.closing(Lease(file)))
            lease.acquire(print, IN_USE)
        for name in ("train", "validation", "test", PROGRESS):
            delete(out / name)
        # This file is removed last. If the process is killed earlier, the file shows that the folder is a dataset.
        retry_io(partial((out / DATASET).unlink, missing_ok=True), out)


def _is_complete(out: Path, settings: dict[str, Any]) -> bool:
    """Returns whether `out` is a complete dataset. If it is, removes temporary files of the import.

    Raises UserError if `out` was made with other settings, or if a store in it is damaged."""
    if not has_settings(out / DATASET, settings):
        return False
    for name in stores_in(out):
        TokenStore(out / name)
    # A process that was killed just before its end can have left this folder.
    delete(out / PROGRESS)
    print(f"{out} is complete already; nothing to do")
    return True


@dataclass
class _Part:
    """One part of the work. If it is the last one to finish, it also merges all parts."""

    out: Path
    files: list[InputFile]  # all files of the input
    left_out: LeftOut
    options: DatasetConfig
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        self.number, self.count = self.options.part_of()
        self.begun = {**self.settings, "parts": self.count}  # the content of the file BEGUN
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
        """Runs this part. Returns whether all parts have finished."""
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
            self.state = read_part_state(self.folder)
            if not self.state.finished:
                self._tokenize(tokenizer, lease)
        states = [read_part_state(folder) for folder in self.folders]
        unfinished = [str(number) for number, state in enumerate(states) if not state.finished]
        if not unfinished:
            self._merge(states, tokenizer)
            return True
        if _is_complete(self.out, self.settings):  # another part has merged all parts meanwhile
            return True
        print(
            f"part {self.number} is finished; to complete {self.out}, these parts have to finish: {', '.join(unfinished)}"
        )
        return False

    def _has_begun(self) -> bool:
        """Returns whether an import with these settings has already saved its progress. Raises UserError if an import with
        other settings has saved its progress here."""
        return has_settings(
            self.out / BEGUN,
            self.begun,
            "the command that began it resumes it if the input and the tokenizer have not changed; to start again, "
            f"remove {self.out}, or give --overwrite",
        )

    def _merge(self, states: list[PartState], tokenizer: TextTokenizer) -> None:
        """Merges all parts, or waits until the process of another part has merged them.

        Raises UserError if the input has changed since it was read."""
        lease = Lease(self.out / PROGRESS / "merge.lease")
        with contextlib.closing(lease):
            while not exists(self.out / DATASET):
                # The other process removes the folder of the lease at its end.
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
        """Returns the tokenizer that the options select. A trained tokenizer is saved in the folder of the part. All parts train
        equal tokenizers."""
        options = self.options
        if options.tokenizer == "none":
            return NoTokenizer(options.eos_token, options.vocab_size)
        size = tokenizer_lib.parse_training_size(options.tokenizer)
        if size:
            return self._trained_tokenizer(size, has_begun)
        tokenizer = tokenizer_lib.load(options.tokenizer, options.eos_token)
        for line in (tokenizer.disable_dropout(), tokenizer.configure_bos(options.bos)):
            if line:
                print(line, flush=True)
        check_losses(tokenizer, _sample_starts(self.files, options), options.lossy_tokenizer)
        return tokenizer

    def _trained_tokenizer(self, size: int, has_begun: bool) -> TextTokenizer:
        """Trains a tokenizer on a sample of the input, or loads the one that this import has trained before."""
        eos_token = self.options.eos_token or tokenizer_lib.END_OF_TEXT
        folder = self.folder / "tokenizer"
        if not has_begun or not exists(folder / "tokenizer.json"):
            print(f"training a tokenizer of {size} tokens on a sample of the text", flush=True)
            files = [file for file in self.files if file.store == "train"]
            # The library ignores Ctrl-C. Therefore it runs in another thread.
            texts = _training_texts(files, self.options)
            training = in_thread(tokenizer_lib.train, texts, size, eos_token)
            training.result().save(folder)
        return tokenizer_lib.load(str(folder / "tokenizer.json"), eos_token)

    def _tokenize(self, tokenizer: TextTokenizer, lease: Lease) -> None:
        """Reads this part's share of the input, from the position in `state` on, and writes it to the stores."""
        state = self.state
        for name in self.stores:
            written = state.stores.setdefault(name, WriterState())
            self.writers[name] = writer_of(self.folder / name, tokenizer, self.options, written)
        self.share.unreadable = state.unreadable
        pace = Pace(self.share.files)
        # The readers of token ids need the eos as an id.
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
        """Distributes the documents of a batch among the stores. tokens: (n,), the tokens of the batch; each eos ends a
        document."""
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
        """Appends tokens to a store. If the last document of another store has not ended, ends it."""
        for name, writer in self.writers.items():
            if name != store and writer.whole and writer.state.open_tokens:
                writer.append([writer.eos])
        self.writers[store].append(tokens)

    def _save(self, lease: Lease) -> None:
        """Flushes the stores to the disk, then saves the state."""
        for writer in self.writers.values():
            writer.flush()
        lease.check()
        if not self._has_begun():
            write_settings(self.out / BEGUN, self.begun)
        write_object(self.folder / STATE, asdict(self.state))


def encode(
    batches: Iterable[DocumentBatch], tokenizer: TextTokenizer, options: DatasetConfig
) -> Iterator[tuple[DocumentBatch, np.ndarray]]:
    """Yields (batch, the token ids of its documents (n,) int64). Raises UserError if the input contains text, but there is no
    tokenizer."""
    ahead: deque[Future] = deque()
    threads = ThreadPoolExecutor(BATCHES_AHEAD)
    try:
        for batch in batches:
            ahead.append(threads.submit(_encode_batch, batch, tokenizer, options))
            if len(ahead) > BATCHES_AHEAD:
                yield ahead.popleft().result()
        for future in ahead:
            yield future.result()
    finally:  # do not wait for the threads, so that Ctrl-C takes effect immediately
        threads.shutdown(wait=False, cancel_futures=True)


def _encode_batch(
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
            # If the vocabulary contains the eos as an ordinary token, the text can contain it. This eos must not end the
            # document.
            ids = ids[ids != tokenizer.eos]
        elif adds_eos:
            ids = _strip_separators(ids, document, separators)
        pieces.append(ids)
        if document.ends and adds_eos:
            pieces.append(np.array([tokenizer.eos]))
    return batch, np.concatenate(pieces)


def _strip_separators(
    ids: np.ndarray, document: Document, separators: list[int | None]
) -> np.ndarray:
    """Returns `ids` without separators at the beginning and the end of the document.

    ids: the ids of the document, or of a part of it."""
    start = 0
    end = len(ids)
    while document.begins and start < end and ids[start] in separators:
        start += 1
    while document.ends and start < end and ids[end - 1] in separators:
        end -= 1
    return ids[start:end]


def _training_texts(files: list[InputFile], options: DatasetConfig) -> Iterator[str]:
    """Yields the texts to train a tokenizer on. Raises UserError if the input contains token ids."""
    for content in _sample(files, options, TRAINING_SAMPLE):
        if not isinstance(content, str):
            raise UserError(
                "the input contains token ids; name the tokenizer that made them with --tokenizer, or give "
                "--tokenizer=none --eos_token=ID --vocab_size=N"
            )
        yield content


def _sample_starts(files: list[InputFile], options: DatasetConfig) -> Iterator[str]:
    """Yields the beginnings of some texts."""
    for content in _sample(files, options, SAMPLED_FILES * SAMPLE_LENGTH):
        if isinstance(content, str):
            yield content[:SAMPLE_LENGTH]


def _sample(files: list[InputFile], options: DatasetConfig, size: int) -> Iterator[Any]:
    """Yields texts or token ids from the input, about `size` characters or tokens in total. They come from up to SAMPLED_FILES
    files, evenly spread over the input, unless the input is smaller than `size`."""
    groups = [files]
    if describe(files).get("bytes", 0) > size:
        count = min(len(files), SAMPLED_FILES)
        groups = [[files[number * len(files) // count]] for number in range(count)]
    for group in groups:
        remaining = size // len(groups)
        for batch in read_batches(Share(group), options, min(remaining, 1 << 16)):
            for document in batch.documents:
                remaining -= len(document.content)
                yield document.content
            if remaining <= 0:
                break
