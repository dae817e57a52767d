"""From a source of text to two token stores, by any number of processes on any number of machines.

    OUT/train/  OUT/validation/   token stores
    OUT/dataset.json              what made them; written last
    OUT/.progress/                while unfinished: what each unit of the input has become (units.py)

Each process takes units that nobody else is at; one puts the stores together when all are finished. The stores'
bytes depend on the input and the settings only, not on the number of processes or on being killed.
"""

import collections
import contextlib
import errno
import json
import shutil
import sys
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from config.dataset_config import DatasetConfig
from mamba_fsdp.data import tokenizer as tokenizers_
from mamba_fsdp.data.documents import documents
from mamba_fsdp.data.readers import BLOCK_BYTES, ROWS
from mamba_fsdp.data.store import SHARDS, TokenStore
from mamba_fsdp.data.text import STORES, TextSource
from mamba_fsdp.data.units import (
    NOTHING_DONE,
    START_AGAIN,
    Progress,
    Unit,
    exact,
    unit_name,
    writer,
)
from mamba_fsdp.data.workers import Workers
from mamba_fsdp.errors import UserError
from mamba_fsdp.formats import DATASET
from mamba_fsdp.lease import Lease, living, share
from mamba_fsdp.report.console import output_that_may_go
from mamba_fsdp.storage import move, read_object, write_atomically

TRAINING_SAMPLE = 32 << 20  # bytes of text that a tokenizer is trained on
PROGRESS = ".progress"
AT_ONCE = 16  # files: each is a round trip on a network file system
RESUMES = "the same command resumes from here"
# The options that the stores' bytes depend on.
RECORDED = (
    "text_column",
    "documents",
    "invalid_utf8",
    "tokenizer",
    "eos_token",
    "splits",
    "pack",
    "vocab_size",
    "validation_fraction",
    "shard_tokens",
)


@output_that_may_go()
def make_dataset(source: TextSource, out: str | Path, *, save_seconds: float = 5.0) -> dict | None:
    """Tokenise `source` into OUT/train and OUT/validation as its options say; resumes where earlier calls stopped, and
    does what calls at the same time leave.

    save_seconds: how many seconds of work a kill can lose. Returns dataset.json's content, None where other parts have
    yet to end. Raises UserError for bad input, for what can't be written and for a worker that died.
    """
    out, options = Path(out), source.options
    settings = {
        "input": source.describe(),
        **{name: getattr(options, name) for name in RECORDED},
        "eos_token": options.eos_token or None,
    }
    try:
        _make_folder(out)
        if options.overwrite:
            _clear(out)
        try:
            return _complete(out, settings) or _Tokenization(source, out, settings).run(
                save_seconds
            )
        except FileNotFoundError:  # OUT/.progress, when another process has just completed it
            done = _complete(out, settings)
            if not done:
                raise
            return done
    except OSError as error:
        remedy = (
            "free some space"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            else "fix that"
        )
        place = f"{error.filename or out}: can't be written ({error.strerror})"
        raise UserError(f"{place}; {remedy}, then {RESUMES}") from error
    except BrokenExecutor as error:
        raise UserError(
            f"a worker process was killed, maybe out of memory; try fewer --workers, {RESUMES}"
        ) from error
    except KeyboardInterrupt:
        print(f"\n{out} is unfinished; {RESUMES}", file=sys.stderr)
        raise


def _make_folder(out):
    """Raises UserError where something else than a dataset is in its place."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; name a folder for the stores")
    out.mkdir(parents=True, exist_ok=True)
    others = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    if others and not any((out / name).exists() for name in ("dataset.json", PROGRESS)):
        raise UserError(
            f"{out}: not empty and not made by this program (it holds {', '.join(others[:3])}); choose "
            "another folder"
        )


def _load(path):
    """A state file's content, or None where there is none."""
    try:
        state = read_object(
            path, {"settings": {"input": {}}, "tokenizer": "", "vocab_size": 1}, START_AGAIN
        )
        DATASET.check(path, state)
        return state
    except FileNotFoundError:
        return None


def _complete(out, settings):
    """The content of dataset.json where the dataset is complete. Raises UserError where it is another."""
    done = _load(out / "dataset.json")
    if done:
        _refuse_other(out, done["settings"], settings)
        for name in set(STORES) & set(done["stores"]):
            TokenStore(out / name)
        _remove_progress(out)  # of a process that was killed, or came, at the very end
        print(f"{out} is complete already; nothing to do")
    return done


def _remove_progress(out):
    """Takes it away at once: who finds a part of it would do units again."""
    gone = out / f"{PROGRESS}.done"
    with contextlib.suppress(OSError):
        (out / PROGRESS).rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _refuse_other(out, before, settings):
    """Raises UserError where the settings that the dataset in `out` was made with are not these."""
    differences = []
    for name, now in settings.items():
        was = before.get(
            name, getattr(DatasetConfig, name, None)
        )  # an option that is newer than the dataset
        if now != was:
            was, now = (
                value.get("first") or value.get("dataset") if isinstance(value, dict) else value
                for value in (was, now)
            )
            differences.append(
                f"{name} was {was!r} and is {now!r}" if was != now else "the input changed"
            )
    if differences:
        raise UserError(
            f"{out} holds other data: {'; '.join(differences)}. Choose another folder, or --overwrite it"
        )


def _clear(out):
    """Removes an earlier dataset, and nothing else. Its indexes go first: a store cut short must not look whole."""
    if alive := living([Lease(path) for path in (out / PROGRESS).glob("*.lease")]):
        raise UserError(
            f"{out}: {alive[0].holder()} is writing here; wait for it or choose another folder"
        )
    for name in ("dataset.json", *(f"{name}/index.json" for name in STORES)):
        (out / name).unlink(missing_ok=True)
    for name in (*STORES, PROGRESS):
        shutil.rmtree(out / name, ignore_errors=True)


def _sample(source):
    for block in source.sample(TRAINING_SAMPLE):
        for text, _ in documents(block, source.options, collections.Counter()):
            if not isinstance(text, str):
                raise UserError(
                    f"{block.name}: column {source.options.text_column!r} holds token ids; name the "
                    "tokenizer that made them with --tokenizer, or take them without: --tokenizer=none"
                )
            yield text


def _vocabulary(source):
    """One more than the largest token id."""
    if source.options.vocab_size:
        return source.options.vocab_size
    print(
        "reading all token ids for the largest one; --vocab_size=NUMBER makes that needless",
        flush=True,
    )
    blocks = (block for unit in range(source.unit_count) for block in source.blocks(unit))
    rows = (
        ids
        for block in blocks
        for ids, _ in documents(block, source.options, collections.Counter())
    )
    return 1 + max((int(ids.max()) for ids in rows if not isinstance(ids, str)), default=0)


class _Tokenization:
    """One process of it: agrees with the others on settings and tokenizer, does units, and merges if it is the last."""

    def __init__(self, source, out, settings):
        self.source, self.out, self.settings, self.folder = source, out, settings, out / PROGRESS
        self.agreed = self.folder / "settings.json"
        # What makes a unit, and a block of it: what is begun can't resume where they are others.
        self.cut = [
            source.unit_count,
            BLOCK_BYTES,
            ROWS,
            2,
        ]  # 2: a JSON list by its elements' bytes

    def run(self, save_seconds):
        source, options = self.source, self.source.options
        self.folder.mkdir(exist_ok=True)
        if source.left_out:
            kinds = ", ".join([*source.left_out[:3], *["..."] * (len(source.left_out) > 3)])
            print(
                f"left out: {len(source.left_out):,} files whose names don't tell a format ({kinds}); --format=text "
                "takes all as text"
            )
        tokenizer = self._agree()
        part, parts = options.part_of()
        # Its own ones first, then those of the part behind it, and so on.
        units = {
            unit_name(unit): unit
            for unit in sorted(
                range(source.unit_count), key=lambda unit: ((unit - part) % parts, unit)
            )
        }
        own = {
            name
            for name, unit in units.items()
            if unit % parts == part and not self._is_finished(name)
        }
        if options.part:
            print(
                f"part {part} of {parts}: {len(own):,} of {len(units):,} units, then what others leave"
            )

        def work(name, lease):
            if bar.total and name not in own:
                bar.total += source.unit_size
            Unit(self.folder, units[name], source, tokenizer).tokenise(
                workers, lease, bar, save_seconds
            )

        with (
            Workers(tokenizer, options) as workers,
            contextlib.closing(Progress(source, len(own))) as bar,
        ):
            held = share(self.folder, units, self._is_finished, work)
        held = held or share(
            self.folder,
            ["merge"],
            lambda _: (self.out / "dataset.json").exists(),
            lambda *_: _merge(self.out, self.folder, self.settings, source, tokenizer),
        )
        return self._say_unfinished(held) if held else _load(self.out / "dataset.json")

    def _is_finished(self, name):
        return (self.folder / f"{name}.json").exists()

    def _agree(self):
        """The tokenizer, made by the first to come and saved in every store's folder. Raises UserError where the others
        have other settings."""
        made, said = [], False
        while held := share(
            self.folder, ["settings"], self._is_agreed, lambda *_: made.append(self._begin())
        ):
            if not said:
                print(f"waiting for {held[0].holder()} to make the tokenizer", flush=True)
            said = True
        agreed = _load(self.agreed)
        if agreed is None or (self.out / "dataset.json").exists():
            raise FileNotFoundError(self.agreed)  # complete by now
        _refuse_other(self.out, agreed["settings"], self.settings)
        if agreed["units"] != self.cut:
            raise UserError(
                f"{self.out}: begun by another version of this program; start again with --overwrite"
            )
        tokenizer = made[0] if made else self._tokenizer(agreed["vocab_size"])
        if tokenizer.identity != agreed["tokenizer"]:
            raise UserError(
                f"tokenizer {self.source.options.tokenizer}: it changed since {self.out} was begun; start "
                "again with --overwrite"
            )
        return tokenizer

    def _tokenizer(self, vocab_size=0):
        """As the options say; one that was trained lies in the folder of the first store."""
        options, trained = self.source.options, self.out / "train" / "tokenizer" / "tokenizer.json"
        if options.tokenizer == "none":
            return tokenizers_.NoTokenizer(
                options.eos_token, vocab_size or _vocabulary(self.source)
            )
        if tokenizers_.training_size(options.tokenizer):
            return tokenizers_.load(str(trained), tokenizers_.END_OF_TEXT)
        return tokenizers_.load(options.tokenizer, options.eos_token)

    def _is_agreed(self, _):
        """What failed before anything was written binds nobody."""
        agreed = _load(self.agreed)
        return agreed is not None and (
            agreed["settings"] == self.settings
            or any(self.folder.glob("[0-9]*.begun"))
            or any(self.folder.glob("[0-9]*.json"))
            or bool(living(list(map(Lease, self.folder.glob("[0-9]*.lease")))))
        )

    def _begin(self):
        """Makes the tokenizer and writes the settings."""
        for name in STORES:
            shutil.rmtree(self.out / name / "tokenizer", ignore_errors=True)
            with contextlib.suppress(
                OSError
            ):  # an earlier attempt held some out, this one need not
                (self.out / name).rmdir()
        if size := tokenizers_.training_size(self.source.options.tokenizer):
            print(f"training a tokenizer of {size} tokens", flush=True)
            tokenizer = tokenizers_.train(_sample(self.source), size)
            if tokenizer.vocab_size < size:
                print(
                    f"it has {tokenizer.vocab_size} tokens only: no more pairs repeat in this little text"
                )
        else:
            tokenizer = self._tokenizer()
        for name in self.source.stores:
            tokenizer.save(self.out / name / "tokenizer")
        write_atomically(
            self.agreed,
            json.dumps(
                {
                    **DATASET.header(),
                    "settings": self.settings,
                    "tokenizer": tokenizer.identity,
                    "vocab_size": tokenizer.vocab_size,
                    "units": self.cut,
                }
            ),
        )
        return tokenizer

    def _say_unfinished(self, held):
        """Living processes are at what is left. Raises UserError where the user expects all to be done."""
        held = sorted(held, key=lambda lease: lease.file)
        holders = list(dict.fromkeys(filter(None, (lease.holder() for lease in held)))) or [
            "another process"
        ]
        shown = "; ".join(holders[:3] + ["..."] * (len(holders) > 3))
        left = ", ".join([lease.file.stem for lease in held[:3]] + ["..."] * (len(held) > 3))
        if not self.source.options.part:
            raise UserError(
                f"{self.out}: another process is writing here ({shown}); wait for it or choose another "
                "folder"
            )
        print(
            f"{self.out} is unfinished ({left}), in the hands of {shown}; the last to end completes it. If they "
            "are stopped, the same command does, with any part"
        )


def _merge(out, folder, settings, source, tokenizer):
    """The last step: the shards of all units, in their order, become the stores; nothing is copied but the shard whose
    end is held out where the documents are too few. Killed, it is begun again by whoever comes next: what it starts
    from stays until dataset.json is written. Raises UserError where there is no text, and where the input changed."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        example = {**NOTHING_DONE, "stores": {"": SHARDS}}
        units = list(
            pool.map(
                lambda unit: read_object(folder / f"{unit_name(unit)}.json", example, START_AGAIN),
                range(source.unit_count),
            )
        )
    counts = {"empty": sum(unit["counts"]["empty"] for unit in units)}
    left_out = f"left out: {counts['empty']:,} empty documents" if counts["empty"] else ""
    if not (written := sum(unit["written"] for unit in units)):
        raise UserError(f"the input holds no text ({left_out or 'it is empty'})")
    if source.describe() != settings["input"]:
        raise UserError("the input changed while it was read; start again with --overwrite")
    names = source.stores
    shards = {
        name: [
            (folder / unit_name(number) / name / shard["name"], shard)
            for number, unit in enumerate(units)
            for shard in unit["stores"].get(name, [])
        ]
        for name in names
    }
    last = (
        shards["train"].pop()
        if settings["validation_fraction"] and not shards["validation"]
        else None
    )
    if empty := [name for name in names if not (shards[name] or last)]:
        raise UserError(f"the split for {out / empty[0]} holds no text")
    stores = {
        name: writer(out / name, source, tokenizer, _put_together(out / name, shards[name]))
        for name in names
    }
    held_out = (
        _hold_out_end(last[0], stores, exact(settings["validation_fraction"]), tokenizer)
        if last
        else 0
    )
    if source.options.pack == "document":
        stores["train"].end_document()
    done = {
        **DATASET.header(),
        "settings": settings,
        "tokenizer": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "counts": counts,
        "stores": {
            name: {"tokens": store.token_count, "documents": store.document_count}
            for name, store in stores.items()
        },
    }
    for path in [
        *out.glob(".*.tmp"),
        *(path for name in names for path in (out / name).rglob(".*.tmp")),
    ]:
        path.unlink()  # what a kill left of files that were being written
    for store in stores.values():
        store.finish()
    write_atomically(out / "dataset.json", json.dumps(done, indent=1) + "\n")
    _remove_progress(out)
    if held_out:
        print(
            f"held out for validation: the last {held_out:,} tokens (a validation_fraction of "
            f"{settings['validation_fraction']:g} of {written:,} document{'s' * (written > 1)} is no whole one)"
        )
    for store in stores.values():
        print(
            f"{str(store.path).removeprefix(f'{Path.cwd()}/')}: {store.token_count:,} tokens in "
            f"{store.document_count:,} document{'s' * (store.document_count != 1)}"
        )
    seconds, tokens = (
        sum(unit["seconds"] for unit in units),
        sum(store.token_count for store in stores.values()),
    )
    print(
        f"vocabulary {tokenizer.vocab_size:,} ({store.dtype.name}); {seconds:.1f} s"
        f"{' of all parts together' * bool(source.options.part)}, {tokens / max(seconds, 1e-9):,.0f} tokens/s"
        f"{' a part' * bool(source.options.part)}{f'; {left_out}' if left_out else ''}"
    )


def _put_together(store, shards):
    """Gives the shards, each (path without suffix, entry), their numbers in the store; what a writer resumes from."""
    entries = [{**shard, "name": f"{number:05d}"} for number, (_, shard) in enumerate(shards)]

    def take(old, new):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            move(old, new)

    pairs = [
        (Path(f"{path}.{suffix}"), store / f"{entry['name']}.{suffix}")
        for (path, _), entry in zip(shards, entries)
        for suffix in ("bin", "doc")
    ]
    store.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(take, *zip(*pairs)))
    return {"shards": entries}


def _hold_out_end(path, stores, fraction, tokenizer):
    """Too few documents for a whole one: the last tokens, of the last shard, become the validation store. Returns their
    number."""
    train, validation = stores["train"], stores["validation"]
    tokens = np.memmap(f"{path}.bin", train.dtype, "r")
    total = train.token_count + len(tokens)
    first = max(1, len(tokens) - max(2, round(total * fraction)))

    def in_a_character(at):
        return tokenizer.backend and tokenizer.backend.decode(
            tokens[max(0, at - 8) : at].tolist()
        ).endswith("\ufffd")

    cut = next(
        (
            at
            for at in range(first, len(tokens) - 1)
            if tokens[at] != train.eos and not in_a_character(at)
        ),
        0,
    )
    if not cut:
        raise UserError(
            f"{total} tokens are too few to hold some out; use --overwrite --validation_fraction=0"
        )
    for store, part in ((train, tokens[:cut]), (validation, tokens[cut:])):
        for begin in range(0, len(part), 1 << 20):
            store.append(part[begin : begin + (1 << 20)])
    return len(tokens) - cut
