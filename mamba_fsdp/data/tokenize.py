"""From a source of text to two token stores: many processes tokenise, one reads, splits and writes, all in order.

    OUT/train/  OUT/validation/   token stores
    OUT/dataset.json              what made them; written last
    OUT/.progress.json            while unfinished: how far it is, for the next run to resume from
    OUT/.lock                     held by the process that writes here

The stores' bytes depend on the input and the settings only, not on the number of workers or on being killed.
"""

import array
import collections
import concurrent.futures
import contextlib
import errno
import fcntl
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mamba_fsdp.data import tokenizer as tokenizers_
from mamba_fsdp.data.documents import documents
from mamba_fsdp.data.order import splitmix64
from mamba_fsdp.data.store import StoreWriter, TokenStore
from mamba_fsdp.data.text import BLOCK_BYTES, Files, Rows, cut_words
from mamba_fsdp.durable import write_atomically
from mamba_fsdp.errors import UserError
from mamba_fsdp.formats import DATASET

TRAINING_SAMPLE = 32 << 20  # bytes of text that a tokenizer is trained on
RESUMES = "the same command resumes from here"
# The options that the stores' bytes depend on.
RECORDED = ("text_column", "documents", "invalid_utf8", "tokenizer", "eos_token", "validation_fraction", "shard_tokens")
STORES = ("train", "validation")


def make_dataset(source: Files | Rows, out: str | Path, *, save_seconds: float = 5.0) -> dict:
    """Tokenise `source` into OUT/train and OUT/validation as its options say; resumes where an earlier call stopped.

    save_seconds: how many seconds of work a kill can lose. Returns dataset.json's content. Raises UserError for bad
    input, for what can't be written and for a worker that died.
    """
    out, options = Path(out), source.options
    settings = {"input": source.describe(), **{name: getattr(options, name) for name in RECORDED},
                "eos_token": options.eos_token or None}
    training_size = tokenizers_.training_size(options.tokenizer)
    try:
        with _locked(out):
            if options.overwrite:
                _clear(out)
            done = _load(out / "dataset.json")
            if done:
                _refuse_other(out, done["settings"], settings)
                for name in done["stores"]:
                    TokenStore(out / name)
                print(f"{out} is complete already; nothing to do")
                return done
            progress = _load(out / ".progress.json")
            if progress and progress["position"] is not None:
                _refuse_other(out, progress["settings"], settings)
                for path in out.rglob(".*.tmp"):  # what a kill left of files that were being written
                    path.unlink()
            else:
                if progress:  # an error stopped the earlier run before it wrote: it may have had other settings
                    _clear(out)
                progress = {**DATASET.header(), "settings": settings, "position": None, "done": 0, "written": 0,
                            "open": False, "seconds": 0.0, "counts": {"empty": 0, "skipped": 0}, "stores": {}}
                write_atomically(out / ".progress.json", json.dumps(progress))
            _say_before(source)
            tokenizer = _tokenizer(out, source, training_size, progress)
            return _Tokenization(source, out, tokenizer, progress).run(save_seconds)
    except OSError as error:
        remedy = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "fix that"
        place = f"{error.filename or out}: can't be written ({error.strerror})"
        raise UserError(f"{place}; {remedy}, then {RESUMES}") from error
    except concurrent.futures.BrokenExecutor as error:
        raise UserError(f"a worker process was killed, maybe out of memory; try fewer --workers, {RESUMES}") from error
    except KeyboardInterrupt:
        print(f"\n{out} is unfinished; {RESUMES}", file=sys.stderr)
        raise


@contextlib.contextmanager
def _locked(out):
    """Makes the folder where it is missing. Raises UserError where something else than a dataset is in its place."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; name a folder for the stores")
    out.mkdir(parents=True, exist_ok=True)
    others = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    if others and not any((out / name).exists() for name in ("dataset.json", ".progress.json")):
        raise UserError(f"{out}: not empty and not made by this program (it holds {', '.join(others[:3])}); choose "
                        "another folder")
    with open(out / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{out}: another process is writing here; wait for it or choose another folder") from None
        yield


def _load(path):
    """A state file's content, or None where there is none."""
    try:
        state = json.loads(path.read_bytes())
        DATASET.check(path, state)
        state["settings"]["input"]
        return state
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); start again with --overwrite") from error


def _refuse_other(out, before, settings):
    """Raises UserError where the settings that the dataset in `out` was made with are not these."""
    differences = []
    for name, now in settings.items():
        if now != before.get(name):
            was, now = (value.get("first") or value.get("dataset") if isinstance(value, dict) else value
                        for value in (before.get(name), now))
            differences.append(f"{name} was {was!r} and is {now!r}" if was != now else "the input changed")
    if differences:
        raise UserError(f"{out} holds other data: {'; '.join(differences)}. Choose another folder, or --overwrite it")


def _clear(out):
    """Removes an earlier dataset, and nothing else. Its indexes go first: a store cut short must not look whole."""
    for name in ("dataset.json", "train/index.json", "validation/index.json"):
        (out / name).unlink(missing_ok=True)
    for name in STORES:
        shutil.rmtree(out / name, ignore_errors=True)
    (out / ".progress.json").unlink(missing_ok=True)


def _say_before(source):
    """What a reader would rather know before the work than after it."""
    fraction, most = source.options.validation_fraction, source.most_documents
    if source.left_out:
        kinds = ", ".join(source.left_out[:3]) + (", ..." if len(source.left_out) > 3 else "")
        print(f"left out: {len(source.left_out):,} files whose names don't tell a format ({kinds}); --format=text takes"
              " all as text")
    if fraction and most is not None and not _for_validation(np.arange(min(most, math.ceil(1 / fraction))),
                                                             _exact(fraction)).any():
        print(f"{most:,} document{'s' * (most > 1)}, too few to hold out a whole one: unless end-of-text tokens in the "
              f"text make more, the last {100 * fraction:g}% of the tokens is for validation")


def _tokenizer(out, source, training_size, progress):
    """The tokenizer, saved in every store's folder; when resuming, the one that the stores were begun with."""
    name, saved = source.options.tokenizer, out / "train" / "tokenizer"
    if training_size and progress["position"]:
        tokenizer = tokenizers_.load(str(saved / "tokenizer.json"), tokenizers_.END_OF_TEXT)
    elif training_size:
        print(f"training a tokenizer of {training_size} tokens")
        tokenizer = tokenizers_.train(_sample(source), training_size)
        if tokenizer.vocab_size < training_size:
            print(f"it has {tokenizer.vocab_size} tokens only: no more pairs repeat in this little text")
    else:
        tokenizer = tokenizers_.load(name, source.options.eos_token)
    if progress.setdefault("tokenizer", tokenizer.identity) != tokenizer.identity:
        raise UserError(f"tokenizer {name}: it changed since {out} was begun; start again with --overwrite")
    for store in STORES if source.options.validation_fraction else STORES[:1]:
        tokenizer.save(out / store / "tokenizer")
    return tokenizer


def _sample(source):
    for block in source.sample(TRAINING_SAMPLE):
        for text, _ in documents(block, source.options, collections.Counter()):
            if not isinstance(text, str):
                raise UserError(f"{block.name}: column {source.options.text_column!r} holds token ids; name the "
                                "tokenizer that made them with --tokenizer")
            yield text


class _Tokenization:
    """One run: reads, hands out to the workers, collects in order, writes, and records how far it is."""

    def __init__(self, source, out, tokenizer, progress):
        self.source, self.out, self.tokenizer, self.progress = source, out, tokenizer, progress
        self.workers = source.options.workers or len(os.sched_getaffinity(0))
        self.fraction = _exact(source.options.validation_fraction)
        self.stores = {name: self._writer(name) for name in (STORES if self.fraction else STORES[:1])}

    def _writer(self, name):
        """Of the store of this name, as far as it is recorded."""
        return StoreWriter(self.out / name, vocab_size=self.tokenizer.vocab_size, eos=self.tokenizer.eos,
                           tokenizer=self.tokenizer.identity, shard_tokens=self.source.options.shard_tokens,
                           state=self.progress["stores"].get(name))

    def run(self, save_seconds):
        saved = time.monotonic()
        started = saved - self.progress["seconds"]
        bar = ProgressBar(self.source, self.progress, self.token_count)
        for chunk, result in self._results():
            self._write(*result)
            self.progress.update(position=chunk[-1].position, done=chunk[-1].done, seconds=time.monotonic() - started)
            bar.show(chunk[-1].done, self.progress["written"], self.token_count)
            if time.monotonic() - saved >= save_seconds:
                self._save()
                saved = time.monotonic()
        self._save()
        bar.close()
        return self._finish()

    @property
    def token_count(self):
        return sum(store.token_count for store in self.stores.values())

    def _results(self):
        """(chunk, what the workers made of it), in the input's order, with only a few chunks per worker under way."""
        context = multiprocessing.get_context("spawn")  # forking after threads have started can deadlock
        arguments = (self.tokenizer.backend.to_str(), self.tokenizer.eos, self.tokenizer.bos, self.tokenizer.vocab_size,
                     self.source.options)
        pool = concurrent.futures.ProcessPoolExecutor(self.workers, context, _start_worker, arguments)
        under_way = collections.deque()
        try:
            for chunk in _chunks(self.source.blocks(self.progress["position"])):
                under_way.append((chunk, pool.submit(_tokenize, chunk)))
                if len(under_way) > 3 * self.workers:
                    chunk, future = under_way.popleft()
                    yield chunk, future.result()
            for chunk, future in under_way:
                yield chunk, future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _write(self, tokens, counts):
        """Deals documents out to the stores by their number."""
        eos, progress = self.tokenizer.eos, self.progress
        for name, count in counts.items():
            progress["counts"][name] += count
        if len(tokens) and tokens[0] == eos and not progress["open"]:
            tokens = tokens[1:]  # the document that this would end has ended already
        if not len(tokens):
            return
        ends = np.flatnonzero(tokens == eos) + 1
        progress["open"] = bool(tokens[-1] != eos)
        bounds = np.append(ends, len(tokens)) if progress["open"] else ends
        held_out = _for_validation(progress["written"] + np.arange(len(bounds)), self.fraction)
        progress["written"] += len(ends)
        if held_out.any():
            of_token = np.repeat(held_out, np.diff(bounds, prepend=0))
            self.stores["validation"].append(tokens[of_token])
            tokens = tokens[~of_token]
        self.stores["train"].append(tokens)

    def _save(self, **states):
        self.progress["stores"] = {name: store.state() for name, store in self.stores.items()} | states
        write_atomically(self.out / ".progress.json", json.dumps(self.progress))

    def _finish(self):
        written, settings = self.progress["written"], self.progress["settings"]
        if not written:
            raise UserError(f"the input holds no text ({self._left_out() or 'it is empty'})")
        if self.source.describe() != settings["input"]:
            raise UserError("the input changed while it was read; start again with --overwrite")
        if self.fraction and not self.stores["validation"].token_count:
            self._hold_out_end()
        self.stores["train"].end_document()
        done = {**DATASET.header(), "settings": settings, "tokenizer": self.tokenizer.identity,
                "vocab_size": self.tokenizer.vocab_size, "counts": self.progress["counts"],
                "stores": {name: {"tokens": store.token_count, "documents": store.document_count}
                           for name, store in self.stores.items()}}
        for store in self.stores.values():
            store.finish()
        write_atomically(self.out / "dataset.json", json.dumps(done, indent=1) + "\n")
        (self.out / ".progress.json").unlink()
        if count := self.progress.get("held_out"):
            print(f"held out for validation: the last {count:,} tokens (a validation_fraction of "
                  f"{settings['validation_fraction']:g} of {written:,} document{'s' * (written > 1)} is no whole one)")
        for store in self.stores.values():
            print(f"{store.path}: {store.token_count:,} tokens in {store.document_count:,} documents")
        seconds, left_out = self.progress["seconds"], self._left_out()
        print(f"vocabulary {self.tokenizer.vocab_size:,} ({store.dtype.name}); {seconds:.1f} s, "
              f"{self.token_count / max(seconds, 1e-9):,.0f} tokens/s" + (f"; {left_out}" if left_out else ""))
        return done

    def _hold_out_end(self):
        """Too few documents for a whole one: the last tokens become the validation store. The training store is cut
        only when that is recorded, so that a run that resumes knows it."""
        train, validation = self.stores["train"], self.stores["validation"]
        tokens, share = train.last_tokens(), max(2, round(train.token_count * self.fraction))
        decode = self.tokenizer.backend.decode
        cut = next((at for at in range(max(1, len(tokens) - share), len(tokens) - 1) if tokens[at] != train.eos
                    and not decode(tokens[max(0, at - 8):at].tolist()).endswith("\ufffd")), 0)  # not in a character
        if not cut:
            raise UserError(f"{train.token_count} tokens are too few to hold some out; use --overwrite "
                            "--validation_fraction=0")
        for first in range(cut, len(tokens), 1 << 20):
            validation.append(tokens[first:first + (1 << 20)])
        state = train.state_before(cut)
        self.progress["held_out"] = len(tokens) - cut
        self._save(train=state)
        train.close()
        self.stores["train"] = self._writer("train")

    def _left_out(self):
        reasons = {"empty": "empty documents", "skipped": "with invalid UTF-8"}
        parts = [f"{count:,} {reasons[name]}" for name, count in self.progress["counts"].items() if count]
        return f"left out: {', '.join(parts)}" if parts else ""


def _chunks(blocks):
    """Lists of blocks of about BLOCK_BYTES together: small files share a trip to a worker."""
    chunk, size = [], 0
    for block in blocks:
        chunk.append(block)
        size += block.size()
        if size >= BLOCK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _exact(fraction):
    return Fraction(fraction).limit_denominator(10 ** 6)


def _for_validation(numbers, fraction):
    """Which documents are held out, (n,) bool, by their running `numbers` (n,): exactly one of each 1/fraction.

    A hash of the group's number chooses within it, so that the choice has no period that the input could share.
    """
    if not fraction:
        return np.zeros(len(numbers), dtype=bool)
    p, q = fraction.numerator, fraction.denominator
    group = numbers * p // q
    first, end = -(-group * q // p), -(-(group + 1) * q // p)
    chosen = (splitmix64(np.uint64(0), group) % (end - first).astype(np.uint64)).astype(np.int64)
    return numbers == first + np.maximum(chosen, group == 0)  # never the first: training needs one, too


def _start_worker(tokenizer, eos, bos, vocab_size, options):
    """Prepares a worker process. It has one core: the library's own threads would fight over them."""
    os.environ["RAYON_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"] = "1", "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    global _worker
    _worker = tokenizers_.Tokenizer.from_str(tokenizer), eos, bos, vocab_size, options


def _end_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def _tokenize(chunk):
    """(tokens (n,) uint32, counts of what is left out) of a list of blocks; each eos ends a document, none is empty."""
    backend, eos, bos, vocab_size, options = _worker
    counts = collections.Counter()
    texts, tokens = [], array.array("I")  # texts: (text, whether an eos follows)

    def flush():
        encodings = backend.encode_batch_fast([text for text, _ in texts], add_special_tokens=False)
        for encoding, (_, closes) in zip(encodings, texts):
            tokens.fromlist(encoding.ids + [eos] * closes)
        texts.clear()

    for block in chunk:
        for content, closes in documents(block, options, counts):
            if isinstance(content, str):
                *parts, last = _short_parts(content)
                texts += [*((part, False) for part in parts), (last, closes)]
            else:
                flush()
                if content.min() < 0 or content.max() >= vocab_size:
                    raise UserError(f"{block.name}: token ids from {content.min()} to {content.max()}, but the "
                                    f"tokenizer knows {vocab_size}; name the one that made them with --tokenizer")
                tokens.fromlist(content[bos is not None and content[0] == bos:].tolist() + [eos])
    flush()
    tokens = np.frombuffer(tokens, dtype=np.uint32)
    # An eos that follows an eos, or stands first, ends nothing; but the first may end the chunk before's open document.
    follows = np.concatenate([[not chunk[0].inside], tokens[:-1] == eos]) if len(tokens) else np.zeros(0, dtype=bool)
    return tokens[~(follows & (tokens == eos))], dict(counts)


def _short_parts(text):
    """A long text in parts, since the library takes some hundred bytes of memory for each token of a call."""
    if len(text) <= BLOCK_BYTES:
        return [text]
    data, parts = text.encode(), []
    while len(data) > BLOCK_BYTES:
        cut = cut_words(data[:BLOCK_BYTES])
        parts.append(data[:cut].decode())
        data = data[cut:]
    return [*parts, data.decode()]


class ProgressBar(tqdm):
    """A live bar on a terminal, a plain line every ten seconds elsewhere."""

    def __init__(self, source, progress, tokens):
        super().__init__(total=source.total, unit=source.unit, unit_scale=True, mininterval=0.2, smoothing=0.05,
                         initial=progress["done"], desc="tokenising", disable=not sys.stderr.isatty())
        self.started = self.printed = time.monotonic()
        self.tokens_before = tokens

    def show(self, done, documents, tokens):
        """done: input read so far, in the source's unit."""
        now = time.monotonic()
        rate = (tokens - self.tokens_before) / max(now - self.started, 1e-9)
        text = f"{documents:,} documents, {tokens:,} tokens, {rate:,.0f} tokens/s"
        self.set_postfix_str(text, refresh=False)
        self.update(done - self.n)
        if self.disable and now - self.printed >= 10:
            print(f"{done / self.total:4.0%}  {text}" if self.total else text, flush=True)
            self.printed = now
