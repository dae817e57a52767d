"""get_dataset.py: from what INPUT names to token stores, by any number of processes on any number of machines.

    OUT/train/  OUT/validation/        token stores
    OUT/dataset.json                   what made them; written last
    OUT/.progress/1-of-4/              while unfinished, of each part: train/, validation/, tokenizer/ and ...
    OUT/.progress/1-of-4/state.json    ... how far it is

Each part writes shards of its own; who ends last puts them together (merging.py). The stores' bytes depend on the input,
the settings and the number of parts, not on being killed.
"""

import contextlib
import errno
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from config.dataset_config import DatasetConfig
from mamba_fsdp.data import tokenizer as tokenizers_
from mamba_fsdp.data.corpus import STORES, Shard, describe, find_shards
from mamba_fsdp.data.encoding import BATCH_SIZE, encode
from mamba_fsdp.data.importers.save_to_disk import rows_are_blocks
from mamba_fsdp.data.merging import exact, merge
from mamba_fsdp.data.reading import Batch, read_batches
from mamba_fsdp.data.sampler import splitmix64
from mamba_fsdp.data.store import SHARDS, StoreWriter, TokenStore
from mamba_fsdp.errors import UserError
from mamba_fsdp.lease import Lease
from mamba_fsdp.report.console import output_that_may_go
from mamba_fsdp.storage import DATASET, read_object, write_atomically

TRAINING_SAMPLE = 32 << 20  # characters of text that a tokenizer is trained on
SAMPLED_SHARDS = 64  # at most, that these come from
PROGRESS = ".progress"
START_AGAIN = "start again with --overwrite, or remove it by hand"
RESUMES = "the same command resumes from here"
NOT_RECORDED = (
    "format",
    "config",
    "split",
    "part",
    "overwrite",
)  # the stores depend on the other options
NUMBERS = 1 << 40  # between the numbers of the first documents of two parts


@dataclass
class PartState:
    """How far a part is. Saved when its stores are flushed, so that another process resumes from it."""

    settings: dict[str, Any]
    tokenizer: str  # its identity
    position: dict[str, Any] | None = None  # in the input, see reading.py
    written: int = 0  # documents ended
    is_open: bool = False  # the last document goes on
    empty: int = 0  # documents left out
    highest: int = 0  # token id
    stores: dict[str, Any] = field(default_factory=dict)  # of each its StoreWriter's state
    finished: bool = False

    @classmethod
    def load(cls, folder: Path) -> "PartState | None":
        """The state of the part in `folder`, None where it was not begun. Raises UserError where it is damaged."""
        example = {
            "settings": {"input": {}},
            "written": 0,
            "empty": 0,
            "highest": 0,
        }
        stores = {"": {"shards": SHARDS}}
        path = folder / "state.json"
        try:
            return cls(**read_object(path, {**example, "stores": stores}, START_AGAIN))
        except FileNotFoundError:
            return None
        except TypeError as error:
            raise UserError(f"{path}: {error}; {START_AGAIN}") from error

    def save(self, folder: Path) -> None:
        write_atomically(folder / "state.json", json.dumps(asdict(self)))


@output_that_may_go()
def make_dataset(
    input: str, out: str | Path, options: DatasetConfig, *, save_seconds: float = 5.0
) -> dict | None:
    """Makes token stores in OUT of what `input` names, as the options say; resumes where earlier calls stopped.

    save_seconds: how many seconds of work a kill can lose. Returns dataset.json's content, None where other parts have
    yet to end. Raises UserError for bad input, and for what can't be written.
    """
    out = Path(out)
    shards = find_shards(input, options)
    options = replace(options, pack=_pack_of(shards, options))
    settings = {name: value for name, value in asdict(options).items() if name not in NOT_RECORDED}
    settings["input"] = describe(shards)
    try:
        _prepare(out, options.overwrite)
        done = _complete(out, settings)
        if done is None:
            done = _Part(out, shards, options, settings).run(save_seconds)
        return done
    except OSError as error:
        remedy = "fix that"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "free some space"
        place = f"{error.filename or out}: can't be written ({error.strerror})"
        raise UserError(f"{place}; {remedy}, then {RESUMES}") from error
    except KeyboardInterrupt:
        print(f"\n{out} is unfinished; {RESUMES}", file=sys.stderr)
        raise


def _pack_of(shards, options):
    """`document` or `none`, also where the option says auto."""
    if options.pack != "auto":
        return options.pack
    for shard in shards:
        is_saved = shard.kind == "save_to_disk"
        if not is_saved or not rows_are_blocks(shard.name, shard.split, options.text_column):
            return "document"
    print("rows of one length: laid end to end as they are (--pack=none)")
    return "none"


def _prepare(out, overwrite):
    """Makes OUT, and removes an earlier dataset in it if told so. Raises UserError where something else is in its
    place."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; name a folder for the stores")
    out.mkdir(parents=True, exist_ok=True)
    others = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    if others and not (out / "dataset.json").exists() and not (out / PROGRESS).exists():
        raise UserError(
            f"{out}: not empty and not made by this program (it holds {', '.join(others[:3])}); choose "
            "another folder"
        )
    if not overwrite:
        return
    # Indexes go first: a store cut short must not look whole.
    for name in ("dataset.json", *(f"{store}/index.json" for store in STORES)):
        (out / name).unlink(missing_ok=True)
    for name in (*STORES, PROGRESS):
        shutil.rmtree(out / name, ignore_errors=True)


def _complete(out, settings):
    """The content of dataset.json, None where there is none yet. Raises UserError where it is of other settings."""
    path = out / "dataset.json"
    try:
        done = read_object(path, {"settings": {"input": {}}, "stores": {}}, START_AGAIN)
    except FileNotFoundError:
        return None
    DATASET.check(path, done)
    _check_same(out, done["settings"], settings)
    for name in set(STORES) & set(done["stores"]):
        TokenStore(out / name)
    shutil.rmtree(
        out / PROGRESS, ignore_errors=True
    )  # of a process that was killed at the very end
    print(f"{out} is complete already; nothing to do")
    return done


def _check_same(out, before, settings):
    """Raises UserError where the settings that the dataset in `out` was made with are not these."""
    for name, now in settings.items():
        was = before.get(name) or ""
        if name in before and was != (now or ""):
            raise UserError(
                f"{out} holds other data: {name} was {was} and is {now}; choose another folder, or "
                "--overwrite it"
            )


class _Part:
    """One part of the work, and the end of all of it if the other parts have ended."""

    def __init__(
        self, out: Path, shards: list[Shard], options: DatasetConfig, settings: dict
    ) -> None:
        self.out = out
        self.shards = shards
        self.options = options
        self.settings = settings
        self.number, self.count = options.part_of()
        self.folders = [out / PROGRESS / f"{part}-of-{self.count}" for part in range(self.count)]
        self.folder = self.folders[self.number]
        self.stores = list(dict.fromkeys(shard.store or "train" for shard in shards))
        self.fraction = 0.0 if shards[0].store else options.validation_fraction
        if self.fraction:
            self.stores = ["train", "validation"]

    def run(self, save_seconds: float) -> dict | None:
        """Returns dataset.json's content if all parts have ended."""
        self._check_others()
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lease(self.folder.name) as lease:
            self.state = PartState.load(self.folder)
            tokenizer = self._tokenizer()
            if self.state is None:
                self.state = PartState(self.settings, tokenizer.identity)
            if self.state.tokenizer != tokenizer.identity:
                raise UserError(
                    f"{self.out}: the tokenizer changed since it was begun; {START_AGAIN}"
                )
            if not self.state.finished:
                self._tokenize(tokenizer, lease, save_seconds)
        states = [PartState.load(folder) for folder in self.folders]
        finished = [state for state in states if state and state.finished]
        if len(finished) < self.count:
            left = self.count - len(finished)
            print(f"part {self.number} is finished; {left} to come complete {self.out}")
            return None
        with self._lease("merge"):
            if (self.out / "dataset.json").exists():  # by now
                return _complete(self.out, self.settings)
            if describe(self.shards) != self.settings["input"]:
                raise UserError(f"{self.out}: the input changed while it was read; {START_AGAIN}")
            parts = list(zip(self.folders, finished))
            done = merge(self.out, parts, tokenizer, self.options, self.settings, self.stores)
            shutil.rmtree(self.out / PROGRESS, ignore_errors=True)
        return done

    def _check_others(self):
        """Raises UserError where a part with other settings was begun, or another number of them."""
        for path in (self.out / PROGRESS).glob("*-of-*"):
            if path.suffix == ".lease":
                continue
            if path not in self.folders:
                raise UserError(f"{self.out}: begun in other parts; {START_AGAIN}")
            state = PartState.load(path)
            if state:
                _check_same(self.out, state.settings, self.settings)

    @contextlib.contextmanager
    def _lease(self, name):
        lease = Lease(self.out / PROGRESS / f"{name}.lease")
        while not lease.try_take():
            if lease.shows_life():
                raise UserError(
                    f"{self.out}: another process is writing here ({lease.holder()}); wait for it or choose "
                    "another folder"
                )
        try:
            yield lease
        finally:
            lease.give_back()

    def _tokenizer(self):
        """As the options say, saved in the part's folder. One that is trained is trained by each part alike."""
        options = self.options
        folder = self.folder / "tokenizer"
        if options.tokenizer == "none":
            return tokenizers_.NoTokenizer(options.eos_token, options.vocab_size)
        size = tokenizers_.training_size(options.tokenizer)
        if size and self.state:
            return tokenizers_.load(str(folder / "tokenizer.json"), tokenizers_.END_OF_TEXT)
        if size:
            print(f"training a tokenizer of {size} tokens", flush=True)
            tokenizer = tokenizers_.train(_sample(self.shards, options), size)
            if tokenizer.vocab_size < size:
                print(
                    f"it has {tokenizer.vocab_size} only: no more pairs repeat in this little text"
                )
        else:
            tokenizer = tokenizers_.load(options.tokenizer, options.eos_token)
        shutil.rmtree(folder, ignore_errors=True)
        tokenizer.save(folder)
        return tokenizer

    def _tokenize(self, tokenizer, lease, save_seconds):
        state = self.state
        self.eos = tokenizer.eos
        self.writers = {}
        for name in self.stores:
            self.writers[name] = StoreWriter(
                self.folder / name,
                vocab_size=tokenizer.vocab_size,
                eos=tokenizer.eos,
                tokenizer=tokenizer.identity,
                shard_tokens=self.options.shard_tokens,
                whole=self.options.pack == "document",
                state=state.stores.get(name),
            )
        part = (self.number, self.count)
        batches = read_batches(self.shards, self.options, BATCH_SIZE, part, state.position)
        started = saved = printed = time.monotonic()
        tokens = 0
        try:
            for batch, ids in encode(batches, tokenizer, self.options):
                self._write(batch, ids)
                tokens += len(ids)
                now = time.monotonic()
                if now - printed >= 10:
                    print(
                        f"{tokens:,} tokens, {tokens / (now - started):,.0f} tokens/s", flush=True
                    )
                    printed = now
                if now - saved >= save_seconds:
                    self._save(lease)
                    saved = now
            self._save(lease)
            for name, writer in self.writers.items():
                state.stores[name] = {"shards": writer.finish_shards()}
            state.written += state.is_open  # a document whose end was not put there
            state.finished = True
            state.save(self.folder)
        finally:
            for writer in self.writers.values():
                writer.close()

    def _write(self, batch: Batch, tokens: np.ndarray) -> None:
        """Deals the documents of a batch out to the stores. tokens: (n,), each eos of which ends a document."""
        state = self.state
        assert state
        is_end = tokens == self.eos
        if self.options.pack == "document":
            ends_nothing = is_end & np.append(not state.is_open, is_end)[:-1]
            tokens = tokens[~ends_nothing]
            is_end = is_end[~ends_nothing]
        state.empty += batch.empty
        state.position = batch.position
        if not len(tokens):
            return
        bounds = np.flatnonzero(is_end) + 1
        first = self.number * NUMBERS + state.written
        state.written += len(bounds)
        state.highest = max(state.highest, int(tokens.max()))
        state.is_open = not is_end[-1]
        if state.is_open:
            bounds = np.append(bounds, len(tokens))
        held_out = for_validation(first + np.arange(len(bounds)), self.fraction)
        if held_out.any():
            is_held_out = np.repeat(held_out, np.diff(bounds, prepend=0))
            self.writers["validation"].append(tokens[is_held_out])
            tokens = tokens[~is_held_out]
        self.writers[batch.store or "train"].append(tokens)

    def _save(self, lease):
        """Makes what was written durable, and then the state that says so."""
        self.state.stores = {name: writer.state() for name, writer in self.writers.items()}
        if not lease.is_held():
            raise UserError(f"{self.out}: this process stood still, and another took over its part")
        self.state.save(self.folder)


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
    shards = [shard for shard in shards if shard.store in ("", "train")]
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
                        "--tokenizer, or take them without: --tokenizer=none"
                    )
                left -= len(content)
                yield content
            if left <= 0:
                break
