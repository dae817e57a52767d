"""get_dataset.py: from what INPUT names to token stores, by any number of processes on any number of machines.

    OUT/train/  OUT/validation/        token stores
    OUT/dataset.json                   what made them; written last
    OUT/.progress/1-of-4/              while unfinished, of each part: train/, validation/, tokenizer/ and ...
    OUT/.progress/1-of-4/state.json    ... how far it is

Each part writes shards of its own; who ends last gives them their numbers in the stores. The stores' bytes depend on
the input, the settings and the number of parts, not on being killed.
"""

import contextlib
import errno
import json
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from config.dataset_config import DatasetConfig
from mamba_fsdp.data import tokenizer as tokenizers_
from mamba_fsdp.data.corpus import SPLITS, Corpus, Piece, open_corpus
from mamba_fsdp.data.encoding import BATCH_SIZE, Encoder
from mamba_fsdp.data.importers import rows_are_blocks
from mamba_fsdp.data.merging import merge
from mamba_fsdp.data.reading import Reader
from mamba_fsdp.data.sampler import splitmix64
from mamba_fsdp.data.store import SHARDS, StoreWriter, TokenStore
from mamba_fsdp.errors import UserError
from mamba_fsdp.formats import DATASET
from mamba_fsdp.lease import Lease, living
from mamba_fsdp.report.console import Console, output_that_may_go
from mamba_fsdp.storage import read_object, write_atomically

TRAINING_SAMPLE = 32 << 20  # characters of text that a tokenizer is trained on
SAMPLED_FILES = 64  # of many, at most, that these come from
PROGRESS = ".progress"
START_AGAIN = "start again with --overwrite"
RESUMES = "the same command resumes from here"
# The options that the stores' bytes depend on.
RECORDED = (
    "text_column",
    "documents",
    "tokenizer",
    "splits",
    "vocab_size",
    "validation_fraction",
    "shard_tokens",
)
NUMBERS = 1 << 40  # between the numbers of the first documents of two parts


@dataclass
class PartState:
    """How far a part is. Saved with the stores flushed, so that a new process resumes from it."""

    settings: dict[str, Any]
    tokenizer: str  # its identity
    piece: int = 0  # of the part's pieces, the one being read
    position: dict[str, Any] | None = None  # in it, see reading.py
    written: int = 0  # documents ended
    is_open: bool = False  # the last document goes on
    empty: int = 0  # documents left out
    seconds: float = 0.0
    highest: int = 0  # token id
    stores: dict[str, Any] = field(default_factory=dict)  # of each its StoreWriter's state
    finished: bool = False


EXAMPLE = {
    "settings": {"input": {}},
    "tokenizer": "",
    "piece": 0,
    "written": 0,
    "empty": 0,
    "stores": {"": {"shards": SHARDS}},
}


@output_that_may_go()
def make_dataset(
    input: str, out: str | Path, options: DatasetConfig, *, save_seconds: float = 5.0
) -> dict | None:
    """Makes token stores in OUT of what `input` names, as the options say; resumes where earlier calls stopped.

    save_seconds: how many seconds of work a kill can lose. Returns dataset.json's content, None where other parts have
    yet to end. Raises UserError for bad input, and for what can't be written.
    """
    out = Path(out)
    corpus = open_corpus(input, options)
    pack = _resolved_pack(corpus, options)
    settings: dict[str, Any] = {"input": corpus.describe()}
    for name in RECORDED:
        settings[name] = getattr(options, name)
    settings["eos_token"] = options.eos_token or None
    settings["pack"] = pack
    settings["strip_tokens"] = list(options.strip_tokens)
    try:
        _make_folder(out)
        if options.overwrite:
            _clear(out)
        done = _complete(out, settings)
        if done:
            return done
        return _Tokenization(corpus, options, settings, out).run(save_seconds)
    except OSError as error:
        remedy = "fix that"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "free some space"
        place = f"{error.filename or out}: can't be written ({error.strerror})"
        raise UserError(f"{place}; {remedy}, then {RESUMES}") from error
    except KeyboardInterrupt:
        print(f"\n{out} is unfinished; {RESUMES}", file=sys.stderr)
        raise


def _resolved_pack(corpus, options):
    """`document` or `none`."""
    if options.pack != "auto":
        return options.pack
    saved = [piece for piece in corpus.pieces if piece.kind == "save_to_disk"]
    if len(saved) < len(corpus.pieces) or not saved:
        return "document"
    if not all(rows_are_blocks(each.names[0], each.split, options.text_column) for each in saved):
        return "document"
    print("rows of one length: laid end to end as they are (--pack=none)")
    return "none"


def _make_folder(out):
    """Raises UserError where something else than a dataset is in its place."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; name a folder for the stores")
    out.mkdir(parents=True, exist_ok=True)
    others = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    is_ours = (out / "dataset.json").exists() or (out / PROGRESS).exists()
    if others and not is_ours:
        raise UserError(
            f"{out}: not empty and not made by this program (it holds {', '.join(others[:3])}); choose "
            "another folder"
        )


def _complete(out, settings):
    """The content of dataset.json where the dataset is complete. Raises UserError where it is another."""
    try:
        done = read_object(out / "dataset.json", {"settings": {"input": {}}}, START_AGAIN)
    except FileNotFoundError:
        return None
    DATASET.check(out / "dataset.json", done)
    _check_same(out, done["settings"], settings)
    for name in set(SPLITS) & set(done["stores"]):
        TokenStore(out / name)
    shutil.rmtree(
        out / PROGRESS, ignore_errors=True
    )  # of a process that was killed at the very end
    print(f"{out} is complete already; nothing to do")
    return done


def _check_same(out, before, settings):
    """Raises UserError where the settings that the dataset in `out` was made with are not these."""
    differences = []
    for name, now in settings.items():
        was = before.get(name, getattr(DatasetConfig, name, []))
        if now == was:
            continue
        if name == "input":
            was, now = (each.get("first") or each.get("dataset") for each in (was, now))
        if was == now:
            differences.append("the input changed")
        else:
            differences.append(f"{name} was {was!r} and is {now!r}")
    if differences:
        raise UserError(
            f"{out} holds other data: {'; '.join(differences)}. Choose another folder, or --overwrite it"
        )


def _clear(out):
    """Removes an earlier dataset, and nothing else. Its indexes go first: a store cut short must not look whole."""
    alive = living([Lease(path) for path in (out / PROGRESS).glob("*.lease")])
    if alive:
        raise UserError(
            f"{out}: {alive[0].holder()} is writing here; wait for it or choose another folder"
        )
    for name in ("dataset.json", *(f"{name}/index.json" for name in SPLITS)):
        (out / name).unlink(missing_ok=True)
    for name in (*SPLITS, PROGRESS):
        shutil.rmtree(out / name, ignore_errors=True)


class _Tokenization:
    """One part of it, and the end of all if the others have ended."""

    def __init__(self, corpus: Corpus, options: DatasetConfig, settings: dict, out: Path) -> None:
        self.corpus = corpus
        self.options = options
        self.settings = settings
        self.out = out
        self.part, self.parts = options.part_of()
        self.folder = self._folder_of(self.part)
        self.pieces, self.stripe = corpus.part(self.part, self.parts)
        self.console = Console()

    def run(self, save_seconds: float) -> dict | None:
        self._check_progress()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.corpus.left_out:
            names = ", ".join(ascii(name)[1:-1] for name in self.corpus.left_out[:3])
            print(
                f"left out: {len(self.corpus.left_out):,} files whose names don't tell a format ({names}, ...); "
                "--format=text takes all as text"
            )
        state = self._load(self.folder)
        if not (state and state.finished):
            with self._lease(self.folder.name) as lease:
                state = self._load(self.folder)  # as who held the lease left it
                if not (state and state.finished):
                    self._tokenize(state, lease, save_seconds)
        states = [self._load(self._folder_of(part)) for part in range(self.parts)]
        finished = [state for state in states if state and state.finished]
        if len(finished) < self.parts:
            print(
                f"part {self.part} of {self.parts} is finished, {self.parts - len(finished)} are not; the last "
                f"to end completes {self.out}"
            )
            return None
        with self._lease("merge"):
            done = _complete_now(self.out)
            if done:
                return done
            folders = [self._folder_of(part) for part in range(self.parts)]
            tokenizer = self._tokenizer(finished[0])
            if self.corpus.describe() != self.settings["input"]:
                raise UserError(f"the input changed while it was read; {START_AGAIN}")
            done = merge(
                self.out, list(zip(folders, finished)), tokenizer, self.settings, self.stores
            )
            shutil.rmtree(self.out / PROGRESS, ignore_errors=True)
        return done

    @property
    def stores(self) -> list[str]:
        if self.corpus.official or not self.settings["validation_fraction"]:
            return self.corpus.stores
        return ["train", "validation"]

    def _folder_of(self, part):
        return self.out / PROGRESS / f"{part}-of-{self.parts}"

    def _check_progress(self):
        """Raises UserError where a part with other settings was begun, or another number of them."""
        for path in (self.out / PROGRESS).glob("*"):
            if path.is_dir() and not path.name.endswith(f"-of-{self.parts}"):
                raise UserError(
                    f"{self.out}: begun as part {path.name.replace('-', ' ')} or by another version; {START_AGAIN}"
                )
            if path.is_dir():
                state = self._load(path)
                if state:
                    _check_same(self.out, state.settings, self.settings)

    @contextlib.contextmanager
    def _lease(self, name):
        lease = Lease(self.out / PROGRESS / f"{name}.lease")
        while not lease.try_take():
            if living([lease]):
                raise UserError(
                    f"{self.out}: another process is writing here ({lease.holder()}); wait for it or choose "
                    "another folder"
                )
        try:
            yield lease
        finally:
            lease.give_back()

    def _load(self, folder):
        try:
            saved = read_object(folder / "state.json", EXAMPLE, START_AGAIN)
            return PartState(**saved)
        except FileNotFoundError:
            return None
        except TypeError as error:
            raise UserError(f"{folder / 'state.json'}: {error}; {START_AGAIN}") from error

    def _tokenize(self, state, lease, save_seconds):
        tokenizer = self._tokenizer(state)
        if state is None:
            state = PartState(self.settings, tokenizer.identity)
        elif tokenizer.identity != state.tokenizer:
            raise UserError(
                f"tokenizer {self.options.tokenizer}: it changed since {self.out} was begun; {START_AGAIN}"
            )
        writers = {
            name: new_writer(self.folder / name, tokenizer, self.settings, state.stores.get(name))
            for name in self.stores
        }
        part = _Part(state, writers, self.settings, self.part * NUMBERS, tokenizer.eos)
        started = saved = time.monotonic() - state.seconds
        before = part.token_count
        try:
            with Encoder(tokenizer, self.options, self.settings["pack"] == "document") as encoder:
                encoder.is_open = state.is_open
                for number in range(state.piece, len(self.pieces)):
                    piece = self.pieces[number]
                    reader = Reader(piece, self.options, state.position, self.stripe)
                    for batch, ids in encoder.encode(reader.batches(BATCH_SIZE)):
                        part.write(piece, ids)
                        state.empty += batch.empty
                        state.position = batch.position
                        now = time.monotonic()
                        state.seconds = now - started
                        self._show(part.token_count, part.token_count - before, now)
                        if now - saved >= save_seconds:
                            self._save(part, lease)
                            saved = now
                    state.piece = number + 1
                    state.position = None
            part.finish()
            self._save(part, lease)
        finally:
            self.console.close()
            for writer in writers.values():
                writer.close()

    def _show(self, tokens, new, now):
        if not hasattr(self, "began"):
            self.began = self.printed = now
        rate = new / max(now - self.began, 1e-9)
        text = f"{tokens:,} tokens, {rate:,.0f} tokens/s"
        self.console.passing(text)
        if not self.console.live and now - self.printed >= 10:
            self.console.line(text)
            self.printed = now

    def _save(self, part, lease):
        part.flush()
        if not lease.is_held():
            raise UserError(
                f"{self.out}: another process took over this part while this one stood still; it stops here"
            )
        write_atomically(self.folder / "state.json", json.dumps(asdict(part.state)))

    def _tokenizer(self, state):
        """As the options say, saved in the part's folder; one that was trained is trained by each part alike."""
        options = self.options
        if options.tokenizer == "none":
            return tokenizers_.NoTokenizer(options.eos_token, options.vocab_size)
        size = tokenizers_.training_size(options.tokenizer)
        saved = self.folder / "tokenizer"
        if size and state:
            return tokenizers_.load(str(saved / "tokenizer.json"), tokenizers_.END_OF_TEXT)
        if size:
            print(f"training a tokenizer of {size} tokens", flush=True)
            tokenizer = tokenizers_.train(_sample(self.corpus, options), size)
            if tokenizer.vocab_size < size:
                print(
                    f"it has {tokenizer.vocab_size} tokens only: no more pairs repeat in this little text"
                )
        else:
            tokenizer = tokenizers_.load(options.tokenizer, options.eos_token)
        shutil.rmtree(saved, ignore_errors=True)
        tokenizer.save(saved)
        return tokenizer


def _complete_now(out):
    path = out / "dataset.json"
    return json.loads(path.read_text()) if path.exists() else None


class _Part:
    """Deals tokens out to the stores of a part."""

    def __init__(
        self, state: PartState, writers: dict, settings: dict, first_number: int, eos: int
    ) -> None:
        self.state = state
        self.writers = writers
        self.eos = eos
        self.adds_eos = settings["pack"] == "document"
        self.fraction = 0 if settings["splits"] == "official" else settings["validation_fraction"]
        self.first_number = first_number

    @property
    def token_count(self) -> int:
        return sum(writer.token_count for writer in self.writers.values())

    def write(self, piece: Piece, tokens: np.ndarray) -> None:
        """Tokens (n,) of the piece, of which each eos ends a document."""
        state = self.state
        is_end = tokens == self.eos
        if self.adds_eos:
            follows = np.concatenate([[not state.is_open], is_end[:-1]])[: len(tokens)]
            tokens = tokens[~(is_end & follows)]  # an eos that follows an eos ends nothing
            is_end = tokens == self.eos
        if not len(tokens):
            return
        state.highest = max(state.highest, int(tokens.max()))
        bounds = np.flatnonzero(is_end) + 1
        ended = len(bounds)
        state.is_open = not is_end[-1]
        if state.is_open:
            bounds = np.append(bounds, len(tokens))
        numbers = self.first_number + state.written + np.arange(len(bounds))
        state.written += ended
        if piece.store:
            self.writers[piece.store].append(tokens)
            return
        held_out = for_validation(numbers, self.fraction)
        if held_out.any():
            is_held_out = np.repeat(held_out, np.diff(bounds, prepend=0))
            self.writers["validation"].append(tokens[is_held_out])
            tokens = tokens[~is_held_out]
        self.writers["train"].append(tokens)

    def flush(self) -> None:
        """Makes what was written durable, and the state say so."""
        if not self.state.finished:
            self.state.stores = {name: writer.state() for name, writer in self.writers.items()}

    def finish(self) -> None:
        state = self.state
        state.written += state.is_open  # a document whose end was not put there
        state.stores = {
            name: {"shards": writer.finish_shards()} for name, writer in self.writers.items()
        }
        state.finished = True


def new_writer(
    path: Path, tokenizer: tokenizers_.TextTokenizer, settings: dict, state: dict | None
) -> StoreWriter:
    """Of a store, or of a part's share of it. state: see StoreWriter."""
    assert tokenizer.eos is not None  # or it would not have been loaded
    return StoreWriter(
        path,
        vocab_size=tokenizer.vocab_size,
        eos=tokenizer.eos,
        tokenizer=tokenizer.identity,
        shard_tokens=settings["shard_tokens"],
        whole=settings["pack"] == "document",
        state=state,
    )


def exact(fraction: float) -> Fraction:
    return Fraction(fraction).limit_denominator(10**6)


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


def _sample(corpus: Corpus, options: DatasetConfig) -> Iterable[str]:
    """Texts from the whole breadth of the input, what is trained on: TRAINING_SAMPLE characters, or all there are."""
    whole = [piece for piece in corpus.pieces if piece.store in ("", "train")]
    files = [Piece(piece.kind, [name], "", piece.split) for piece in whole for name in piece.names]
    share = TRAINING_SAMPLE
    pieces = whole
    if len(files) > 1 and sum(map(_bytes_of, files)) > TRAINING_SAMPLE:
        count = min(len(files), SAMPLED_FILES)
        share = TRAINING_SAMPLE // count
        pieces = [files[number * len(files) // count] for number in range(count)]
    for piece in pieces:
        left = share
        for batch in Reader(piece, options).batches(1 << 16):
            for document in batch.documents:
                if not isinstance(document.content, str):
                    raise UserError(
                        f"{piece.names[0]}: holds token ids; name the tokenizer that made them with "
                        "--tokenizer, or take them without: --tokenizer=none"
                    )
                left -= len(document.content)
                yield document.content
            if left <= 0:
                break


def _bytes_of(piece):
    path = Path(piece.names[0])
    return path.stat().st_size if path.is_file() else 0
