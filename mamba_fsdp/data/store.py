"""Token stores: a tokenised corpus as a folder of flat, memory-mapped files.

    index.json       what the store holds, with its own checksum; written last, so a folder without it is no store
    00000.bin        token ids, little endian uint16 or uint32, every document ended by exactly one eos, except
                     where pack=none took token ids as they are
    00000.doc        where each document of the shard starts, in tokens from the shard's start, little endian int64
    tokenizer/       the tokenizer, as `transformers` saves it

Documents never cross shards. The bytes depend on the tokens and the shard size only.
"""

import bisect
import functools
import hashlib
import itertools
import json
import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike

from mamba_fsdp.data.source import Tokens
from mamba_fsdp.errors import UserError, near_name
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage import (
    TOKEN_STORE,
    exists,
    like,
    read_object,
    retry_io,
    sync_folder,
    write_object,
)

SHARDS = [{"name": ..., "tokens": 1, "documents": 1, "bin_sha256": "", "doc_sha256": ""}]
INDEX = {"dtype": "", "vocab_size": 0, "eos": -1, "tokenizer": "", "shards": SHARDS}
# What get_dataset.py calls its stores, and the words by which folders and files name such a split.
SPLITS = {
    "train": ["train"],
    "validation": ["validation", "valid", "val", "dev"],
    "test": ["test"],
}
LOOKS_AT_ONCE = (
    16  # at files: each is a round trip on a network file system, and a large store has thousands
)
LARGEST_DOCUMENT = np.iinfo(np.int32).max  # positions are int32


class TokenStore:
    """A store open for reading, the native Source. Cheap to open and to pickle: shards are mapped when first read.

    Opening checks the index and every file's size; `verify` reads everything. Raises UserError naming file and fault.
    index: what another process has opened and checked; then no file is touched before it is read, and is checked then.
    """

    def __init__(self, path: str | Path, index: dict | None = None):
        self.path = Path(path)
        self.index = index or _read_index(self.path)
        self.dtype = np.dtype(self.index["dtype"]).newbyteorder("<")
        self.vocab_size = self.index["vocab_size"]
        self.eos = self.index["eos"]
        self.tokenizer = self.index["tokenizer"]
        self.identity = self.index["checksum"]
        self._shards = self.index["shards"]
        self._starts = [0, *itertools.accumulate(shard["tokens"] for shard in self._shards)]
        self.token_count = self._starts[-1]
        self.document_count = sum(shard["documents"] for shard in self._shards)
        self._map = functools.cache(self._map_anew)  # of shards that were read
        if index is None:
            with ThreadPoolExecutor(LOOKS_AT_ONCE) as pool:
                list(pool.map(self._map_anew, range(len(self._shards))))

    def __reduce__(self):
        return TokenStore, (self.path, self.index)

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer's folder. Raises UserError where the store came without one."""
        path = self.path / "tokenizer"
        if not path.is_dir():
            raise UserError(
                f"{path}: the store has no tokenizer; make it again with get_dataset.py --tokenizer=..."
            )
        return path

    def read(self, start: int, count: int) -> Tokens:
        """Tokens [start, start + count) of the store, across shards, with their positions."""
        assert 0 <= start <= start + count <= self.token_count
        first = min(bisect.bisect_right(self._starts, start), len(self._shards)) - 1
        last = max(first, bisect.bisect_left(self._starts, start + count) - 1)
        parts = [self._read_shard(shard, start, start + count) for shard in range(first, last + 1)]
        tokens, positions = zip(*parts)
        return Tokens(np.concatenate(tokens), np.concatenate(positions))

    def verify(self) -> None:
        """Reads every file and compares checksums. Raises UserError naming the first damaged one."""
        for shard in self._shards:
            for suffix in ("bin", "doc"):
                path = self.path / f"{shard['name']}.{suffix}"
                if _sha256(path) != shard[f"{suffix}_sha256"]:
                    raise UserError(
                        f"{path}: the content does not match its checksum; copy or make the store again"
                    )

    def _read_shard(self, shard, start, end):
        """The part of the store's tokens [start, end) that lies in this shard, with positions."""
        tokens, starts = self._map(shard)
        offset = max(start - self._starts[shard], 0)
        end = min(end - self._starts[shard], len(tokens))
        first = starts.searchsorted(offset, "right") - 1
        inner = starts[first + 1 : starts.searchsorted(end, "left")] - offset
        lengths = np.diff(inner, append=end - offset)
        position = offset - int(starts[first])
        rises = (inner[:1] > 0).all() and (lengths > 0).all()
        if not (rises and 0 <= position < LARGEST_DOCUMENT):
            raise UserError(
                f"{self.path / self._shards[shard]['name']}.doc: damaged, what it says is no start of a "
                "document; copy it again or make the store again"
            )
        positions = np.arange(position, position + end - offset, dtype=np.int32)
        if len(inner):
            positions[inner[0] :] -= np.repeat(positions[inner], lengths)
        return tokens[offset:end], positions

    def _map_anew(self, shard):
        """(tokens, where its documents start) of a shard, both mapped, if their files have the right size."""
        entry = self._shards[shard]
        stem = self.path / entry["name"]
        starts = np.dtype("<i8")
        return (
            _map_file(Path(f"{stem}.bin"), self.dtype, entry["tokens"]),
            _map_file(Path(f"{stem}.doc"), starts, entry["documents"]),
        )


def is_store(path: Path) -> bool:
    """Whether a token store lies at `path`."""
    return exists(path / "index.json")


def split_in(path: Path, split: str = "train") -> Path:
    """The store `path` itself, or its subfolder for `split`, by any name in SPLITS, if that is a store."""
    if not is_store(path):
        for name in SPLITS[split]:
            if is_store(path / name):
                return path / name
    return path


def near_path(path: Path) -> str:
    """A hint for a path where nothing is: what beside it may be meant; "" if nothing."""
    hint = near_name(path.name, [beside.name for beside in path.parent.glob("*")], "")
    if hint:
        hint = f"; {hint}"
    return hint


def _map_file(path, dtype, count):
    """A file of `count` numbers, mapped. Raises UserError where it is missing or has another size than its index says."""
    expected = count * dtype.itemsize
    remedy = "copy it again or make the store again"

    def attempt():
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected:
                raise UserError(f"{path}: {size} bytes, but its index says {expected}; {remedy}")
            # A plain array over the map: np.memmap's own indexing costs microseconds a call.
            return np.asarray(np.memmap(file, dtype, "r"))

    try:
        return retry_io(attempt, path)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}); {remedy}") from error


@dataclass
class StoreWriter:
    """Writes a store. `state()` makes what was appended durable and returns what a new writer resumes from.

    Raises OSError as the disk does, UserError for tokens outside the vocabulary and documents of 2**31 tokens or more.
    """

    path: Path
    vocab_size: int
    eos: int  # -1 where none is known
    tokenizer: str  # its identity, see tokenizer.py; "" for none
    shard_tokens: int = DatasetConfig.shard_tokens
    # A shard's last document ends in it; else tokens are cut anywhere, and what no eos ends counts as a document.
    whole: bool = True
    resumed: dict[str, Any] = field(default_factory=dict)  # an earlier writer's state

    def __post_init__(self) -> None:
        assert -1 <= self.eos < self.vocab_size <= 1 << 32 and self.shard_tokens > 0
        self.dtype = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")
        state = {"shards": [], "tokens": 0, "documents": 0, "open": 0, **self.resumed}
        self._shards = list(state["shards"])
        self._open = state["open"]  # tokens of the document that has not ended
        self._tokens = state["tokens"]  # of the shard that is being written
        self._documents = state["documents"]
        self._files: list[BinaryIO] = []  # of that shard, once something is written to it
        self.path.mkdir(parents=True, exist_ok=True)

    def append(self, tokens: ArrayLike) -> None:
        """Appends `tokens` (n,), integers: each eos ends a document; the next call continues what has no end yet."""
        tokens = np.asarray(tokens)
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= self.vocab_size):
            raise UserError(
                f"{self.path}: token ids from {tokens.min()} to {tokens.max()}, but the vocabulary has {self.vocab_size}; "
                "name the tokenizer that made them with --tokenizer, or the --vocab_size where there is none"
            )
        while len(tokens):
            end = max(1, self.shard_tokens - self._tokens)
            if self.whole:  # the document that fills the shard goes on to its end
                document_ends = np.flatnonzero(tokens[end - 1 :] == self.eos)
                if len(document_ends):
                    end += int(document_ends[0])
                else:
                    end = len(tokens) + 1
            self._write(tokens[:end])
            if end <= len(tokens):
                self._finish_shard()
            tokens = tokens[end:]

    def state(self) -> dict:
        """Flushes to disk; returns a JSON-able dict for `StoreWriter(..., state=...)`."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        return {
            "shards": list(self._shards),
            "tokens": self._tokens,
            "documents": self._documents,
            "open": self._open,
        }

    def finish_shards(self) -> list[dict]:
        """Returns the shards as an index lists them, the last one finished too."""
        assert not (self.whole and self._open), "the last document has no end"
        if self._tokens:
            self._finish_shard()
        return self._shards

    def finish(self) -> TokenStore:
        """Writes the index: from here on the folder is a store. Returns it open."""
        shards = self.finish_shards()
        assert shards, "a store holds at least one document"
        sync_folder(self.path)
        index = {
            **TOKEN_STORE.header(),
            "dtype": self.dtype.name,
            "vocab_size": self.vocab_size,
            "eos": self.eos,
            "tokenizer": self.tokenizer,
            "shards": shards,
        }
        index["checksum"] = _checksum(index)
        write_object(self.path / "index.json", index)
        return TokenStore(self.path)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _paths(self):
        return [self.path / f"{len(self._shards):05d}.{suffix}" for suffix in ("bin", "doc")]

    def _open_files(self):
        """The current shard's files, to be written behind what is known to be in them. What is there too is not cut
        off now: of a process that is taken for dead and wakes, it is what this one is about to write there."""
        if self._files:
            return
        sizes = [self._tokens * self.dtype.itemsize, self._documents * 8]
        for path, size in zip(self._paths(), sizes):
            file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
            self._files.append(file)
            if file.seek(0, os.SEEK_END) < size:
                raise UserError(f"{path}: shorter than recorded; start again with --overwrite")
            file.seek(size)

    def _write(self, tokens):
        ends = np.flatnonzero(tokens == self.eos) + 1
        starts = ends[ends < len(tokens)]
        if not self._open:
            starts = np.append(0, starts)
        lengths = np.diff(ends, prepend=-self._open, append=len(tokens))
        if lengths.max() > LARGEST_DOCUMENT:
            raise UserError(
                f"{self.path}: a document has {lengths.max()} tokens, more than {LARGEST_DOCUMENT}; cut it into "
                "smaller documents"
            )
        self._open_files()
        self._files[0].write(tokens.astype(self.dtype).tobytes())
        self._files[1].write((starts + self._tokens).astype("<i8").tobytes())
        self._tokens += len(tokens)
        self._documents += len(starts)
        self._open = int(lengths[-1])

    def _finish_shard(self):
        self._open_files()
        for file in self._files:
            file.truncate()  # here: what an earlier process wrote with other settings may be longer
        self.state()
        self.close()
        bin_sha256, doc_sha256 = map(_sha256, self._paths())
        self._shards.append(
            {
                "name": f"{len(self._shards):05d}",
                "tokens": self._tokens,
                "documents": self._documents,
                "bin_sha256": bin_sha256,
                "doc_sha256": doc_sha256,
            }
        )
        self._tokens = self._documents = self._open = 0
        self._files = []


def _read_index(folder):
    path = folder / "index.json"
    if not exists(path):
        raise UserError(_why_no_store(folder))
    index = read_object(path, {"format": ""}, "make a token store there with get_dataset.py")
    TOKEN_STORE.check(path, index)
    if index.get("checksum") != _checksum(index):
        raise UserError(
            f"{path}: the index does not match its own checksum; copy it again or make the store again"
        )
    try:
        like(index, INDEX)
        if index["dtype"] not in ("uint16", "uint32"):
            raise ValueError(f"dtype {index['dtype']}")
        return index
    except ValueError as error:
        raise UserError(f"{path}: garbled ({error}); make the store again") from error


def _why_no_store(folder):
    if not folder.exists():
        hint = near_path(folder) or "; make a token store there with get_dataset.py"
        return f"{folder}: no such folder{hint}"
    if (folder / "train" / "index.json").exists():
        return f"{folder}: a folder of token stores; name one of them, as in {folder / 'train'}"
    if (folder / ".progress").exists() or (folder / "00000.bin").exists():
        return f"{folder}: an unfinished token store (no index.json); run its get_dataset.py command again"
    return (
        f"{folder}: not a token store (no index.json), which training reads. Make one from text or token ids with: "
        f".venv/bin/python get_dataset.py {shlex.quote(str(folder))} OUT"
    )


def _checksum(index):
    content = {name: value for name, value in index.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
