"""Keeps token stores: a tokenised corpus as a folder of flat, memory-mapped files.

    index.json       what the store holds, with its own checksum; written last: a folder without it is not a store
    00000.bin        token ids, little endian uint16 or uint32, every document ended by exactly one eos, except
                     that pack=none took token ids as they are
    00000.doc        where each document of 00000.bin starts, in tokens from the file's start, little endian int64
    tokenizer/       the tokenizer, as `transformers` saves it

Documents never cross files. The bytes depend only on the tokens and `shard_tokens`.
"""

import bisect
import hashlib
import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike

from mamba_fsdp.data.source import Tokens
from mamba_fsdp.errors import UserError
from mamba_fsdp.importing.kinds import INDEX, is_store, unexpected_data_error
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.formats import TOKEN_STORE
from mamba_fsdp.storage.patience import is_folder, open_to_read, retry_io, sync_folder
from mamba_fsdp.storage.typed_json import FileName, at_least, from_json, read_object, write_object

# Files that are opened at a time: each costs a round trip on a network file system, and a large store has thousands.
OPENED_AT_ONCE = 16
LARGEST_DOCUMENT = np.iinfo(np.int32).max  # positions are int32


@dataclass
class StoreFile:
    """The index's entry for NAME.bin and NAME.doc."""

    name: FileName
    bin_sha256: str
    doc_sha256: str
    tokens: int = at_least(1)
    documents: int = at_least(1)


@dataclass
class StoreIndex:
    """The content of index.json."""

    dtype: str
    vocab_size: int
    tokenizer: str  # its identity, see tokenizer.py; "": not known
    files: list[StoreFile]
    eos: int = at_least(-1)  # -1: not known
    checksum: str = ""  # of all else in index.json


@dataclass
class WriterState:
    """The progress of a StoreWriter; a new writer resumes from it."""

    files: list[StoreFile] = field(default_factory=list)  # that are complete
    tokens: int = 0  # in the file that is being written
    documents: int = 0  # in that file
    open_tokens: int = 0  # in its last document, if that has not ended

    def total(self) -> int:
        """Returns the number of tokens in all files."""
        return self.tokens + sum(file.tokens for file in self.files)


class TokenStore:
    """A store open for reading, the native Source. Cheap to open and to pickle: files are mapped when first read.

    Opening checks the index and every file's size; `verify` reads everything. Raises UserError naming file and fault.
    index: one that another process has opened and checked; then a file is only touched, and checked, when it is read.
    """

    def __init__(self, path: str | Path, index: StoreIndex | None = None):
        self.path = Path(path)
        self.index = index or _read_index(self.path)
        self.dtype = np.dtype(self.index.dtype).newbyteorder("<")
        self.vocab_size = self.index.vocab_size
        self.eos = self.index.eos
        self.tokenizer = self.index.tokenizer
        self.identity = self.index.checksum
        self._files = self.index.files
        self._starts = [0, *itertools.accumulate(file.tokens for file in self._files)]
        self.token_count = self._starts[-1]
        self.document_count = sum(file.documents for file in self._files)
        self._mapped: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # the files that were read
        if index is None:
            with ThreadPoolExecutor(OPENED_AT_ONCE) as pool:
                list(pool.map(self._map_file_pair, range(len(self._files))))

    def __reduce__(self) -> tuple[type, tuple[Path, StoreIndex]]:
        return TokenStore, (self.path, self.index)

    @property
    def tokenizer_path(self) -> Path:
        """Returns the tokenizer's folder. Raises UserError if the store came without one."""
        path = self.path / "tokenizer"
        if not is_folder(path):
            raise UserError(
                f"{path}: the store has no tokenizer; make it again with get_dataset.py --tokenizer=..."
            )
        return path

    def read(self, start: int, count: int) -> Tokens:
        """Returns tokens [start, start + count) of the store, across files, with their positions."""
        assert 0 <= start <= start + count <= self.token_count
        first = min(bisect.bisect_right(self._starts, start), len(self._files)) - 1
        last = max(first, bisect.bisect_left(self._starts, start + count) - 1)
        pieces = [
            self._read_file(number, start, start + count) for number in range(first, last + 1)
        ]
        tokens, positions = zip(*pieces)
        return Tokens(np.concatenate(tokens), np.concatenate(positions))

    def verify(self, only_used: bool = False) -> None:
        """Reads every file, or those from which this object has read, and compares checksums. Raises UserError naming the
        first damaged one."""
        numbers = sorted(self._mapped) if only_used else range(len(self._files))
        for number in numbers:
            file = self._files[number]
            for suffix, checksum in (("bin", file.bin_sha256), ("doc", file.doc_sha256)):
                path = self.path / f"{file.name}.{suffix}"
                digest = retry_io(partial(_begin_digest, path), path)
                if digest.hexdigest() != checksum:
                    raise UserError(
                        f"{path}: the content does not match its checksum; copy or make the store again"
                    )

    def _read_file(self, number: int, start: int, end: int) -> Tokens:
        """Returns the store's tokens [start, end) as far as they lie in this file."""
        if number not in self._mapped:
            self._mapped[number] = self._map_file_pair(number)
        tokens, starts = self._mapped[number]
        offset = max(start - self._starts[number], 0)
        end = min(end - self._starts[number], len(tokens))
        first = starts.searchsorted(offset, "right") - 1
        inner = starts[first + 1 : starts.searchsorted(end, "left")] - offset
        lengths = np.diff(inner, append=end - offset)
        position = offset - int(starts[first])
        rises = (inner[:1] > 0).all() and (lengths > 0).all()
        if not (rises and 0 <= position < LARGEST_DOCUMENT):
            raise UserError(
                f"{self.path / self._files[number].name}.doc: damaged, its numbers are not starts of documents; "
                "copy it again or make the store again"
            )
        positions = np.arange(position, position + end - offset, dtype=np.int32)
        if len(inner):
            positions[inner[0] :] -= np.repeat(positions[inner], lengths)
        return Tokens(tokens[offset:end], positions)

    def _map_file_pair(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Maps a file's tokens, and the starts of its documents. Raises UserError if a file has the wrong size."""
        file = self._files[number]
        tokens = _map_file(self.path / f"{file.name}.bin", self.dtype, file.tokens)
        starts = _map_file(self.path / f"{file.name}.doc", np.dtype("<i8"), file.documents)
        return tokens, starts


def _map_file(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """Maps a file of `count` numbers. Raises UserError if it is missing or its index says another size."""
    expected = count * dtype.itemsize
    remedy = "copy it again or make the store again"

    def attempt() -> np.ndarray:
        with open_to_read(path) as file:
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
    """Writes a store. After `flush`, `state` says what is durable, and a new writer can resume from it.

    Raises OSError as the disk does, UserError for documents of 2**31 tokens or more.
    """

    path: Path
    vocab_size: int
    eos: int  # -1: not known
    tokenizer: str  # its identity, see tokenizer.py; "": not known
    shard_tokens: int = DatasetConfig.shard_tokens
    # A file ends where a document ends; if False, tokens are cut anywhere, and text without an eos counts as a
    # document.
    whole: bool = True
    state: WriterState = field(default_factory=WriterState)  # an earlier writer's, to resume from

    def __post_init__(self) -> None:
        assert -1 <= self.eos < self.vocab_size <= 1 << 32 and self.shard_tokens > 0
        self.dtype = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")
        # Of the file that is being written, after its first token.
        self._streams: list[BinaryIO] = []
        self._digests: list[Any] = []  # SHA-256 of what `state` counts of each stream
        self.path.mkdir(parents=True, exist_ok=True)

    def append(self, tokens: ArrayLike) -> None:
        """Appends `tokens` (n,), integers. Each eos ends a document; the next call continues a document without an
        end."""
        tokens = np.asarray(tokens)
        assert not len(tokens) or 0 <= tokens.min() <= tokens.max() < self.vocab_size
        while len(tokens):
            end = max(1, self.shard_tokens - self.state.tokens)
            if self.whole:  # the document that fills the file is written to its end
                document_ends = np.flatnonzero(tokens[end - 1 :] == self.eos)
                if len(document_ends):
                    end += int(document_ends[0])
                else:
                    end = len(tokens) + 1
            self._write(tokens[:end])
            if end <= len(tokens):
                self._finish_file()
            tokens = tokens[end:]

    def flush(self) -> None:
        """Makes what `state` counts durable."""
        for stream in self._streams:
            stream.flush()
            os.fsync(stream.fileno())

    def finish_files(self) -> list[StoreFile]:
        """Completes the last file too. Returns all files as an index lists them."""
        assert not (self.whole and self.state.open_tokens), "the last document has no end"
        if self.state.tokens:
            self._finish_file()
        return self.state.files

    def finish(self) -> TokenStore:
        """Writes the index: from here on the folder is a store. Returns it open."""
        files = self.finish_files()
        assert files, "a store holds at least one document"
        sync_folder(self.path)
        index = StoreIndex(
            dtype=self.dtype.name,
            vocab_size=self.vocab_size,
            eos=self.eos,
            tokenizer=self.tokenizer,
            files=files,
        )
        content = {**TOKEN_STORE.header(), **asdict(index)}
        content["checksum"] = _checksum(content)
        write_object(self.path / INDEX, content)
        return TokenStore(self.path)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def _paths(self) -> list[Path]:
        return [self.path / f"{len(self.state.files):05d}.{suffix}" for suffix in ("bin", "doc")]

    def _open_streams(self) -> None:
        """Opens the current pair of files at the end of what `state` counts.

        Bytes beyond that are not cut off now: if a process that was taken for dead wakes up, it writes the same bytes
        there as this one.
        """
        if self._streams:
            return
        sizes = [self.state.tokens * self.dtype.itemsize, self.state.documents * 8]
        self._digests = []
        for path, size in zip(self._paths(), sizes):
            stream = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
            self._streams.append(stream)
            if stream.seek(0, os.SEEK_END) < size:
                raise UserError(f"{path}: shorter than recorded; start again with --overwrite")
            stream.seek(size)
            self._digests.append(_begin_digest(path, size))

    def _write(self, tokens: np.ndarray) -> None:
        state = self.state
        ends = np.flatnonzero(tokens == self.eos) + 1
        starts = ends[ends < len(tokens)]
        if not state.open_tokens:
            starts = np.append(0, starts)
        lengths = np.diff(ends, prepend=-state.open_tokens, append=len(tokens))
        if lengths.max() > LARGEST_DOCUMENT:
            raise UserError(
                f"{self.path}: a document has {lengths.max()} tokens, more than {LARGEST_DOCUMENT}; cut it into "
                "smaller documents"
            )
        self._open_streams()
        contents = [
            tokens.astype(self.dtype).tobytes(),
            (starts + state.tokens).astype("<i8").tobytes(),
        ]
        for stream, digest, content in zip(self._streams, self._digests, contents):
            stream.write(content)
            digest.update(content)
        state.tokens += len(tokens)
        state.documents += len(starts)
        state.open_tokens = int(lengths[-1])

    def _finish_file(self) -> None:
        self._open_streams()
        for stream in self._streams:
            stream.truncate()  # an earlier process with other settings may have written more
        self.flush()
        self.close()
        self._streams = []
        state = self.state
        name = FileName(f"{len(state.files):05d}")
        bin_sha256, doc_sha256 = [digest.hexdigest() for digest in self._digests]
        state.files.append(StoreFile(name, bin_sha256, doc_sha256, state.tokens, state.documents))
        state.tokens = 0
        state.documents = 0
        state.open_tokens = 0


def _read_index(folder: Path) -> StoreIndex:
    path = folder / INDEX
    if not is_store(folder):
        raise unexpected_data_error(folder)
    content = read_object(path, dict[str, Any], "make a token store there with get_dataset.py")
    body = TOKEN_STORE.body(path, content)
    if body.get("checksum") != _checksum(content):
        raise UserError(
            f"{path}: the index does not match its own checksum; copy it again or make the store again"
        )
    try:
        index = from_json(StoreIndex, body)
        if index.dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype {index.dtype}")
        return index
    except ValueError as error:
        raise UserError(f"{path}: garbled ({error}); make the store again") from error


def _checksum(index: dict[str, Any]) -> str:
    """Returns the checksum of index.json's content without the checksum."""
    content = {name: value for name, value in index.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _begin_digest(path: Path, size: int = 1 << 63) -> Any:
    """Returns the SHA-256 of a file's first `size` bytes, to which more can be added. Raises OSError."""
    digest = hashlib.sha256()
    with open_to_read(path) as file:
        while block := file.read(min(size, 1 << 20)):
            digest.update(block)
            size -= len(block)
    return digest
