"""Reads and writes token stores. A token store is a tokenized corpus: a folder of flat, memory-mapped files.

    index.json       a description of the store, with a checksum. This file is written last; a folder without it is not a
                     store.
    00000.bin        token ids, little endian uint16 or uint32. Each document ends with exactly one eos, unless the store was
                     made with pack=none.
    00000.doc        the start of each document in 00000.bin, counted in tokens, little endian int64
    tokenizer/       the tokenizer, in the format of `transformers`

No document is split between files. The content of the files depends only on the tokens and `shard_tokens`.
"""

import bisect
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mamba_fsdp.data.source import Tokens
from mamba_fsdp.errors import UserError
from mamba_fsdp.importing.kinds import INDEX, is_store, unexpected_data_error
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.formats import TOKEN_STORE
from mamba_fsdp.storage.retry import (
    is_folder,
    make_folder,
    open_with_retries,
    size_of,
    sync_folder,
    write_part,
)
from mamba_fsdp.storage.typed_json import FileName, at_least, from_json, read_object, write_object

# The number of files to open at the same time. Each costs a round trip on a network file system, and a large store has
# thousands of files.
OPEN_THREADS = 16
MAX_UNWRITTEN = 1 << 26  # bytes of a file that a writer keeps in memory
MAX_DOCUMENT = np.iinfo(np.int32).max  # positions within a document are int32


@dataclass
class StoreFile:
    """The entry for NAME.bin and NAME.doc in the index."""

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
    tokenizer: str  # the identity of the tokenizer, see tokenizer.py; "": unknown
    files: list[StoreFile]
    eos: int = at_least(-1)  # -1: unknown
    checksum: str = ""  # the checksum of all other fields in index.json


@dataclass
class WriterState:
    """The progress of a StoreWriter; a new writer resumes from it."""

    files: list[StoreFile] = field(default_factory=list)  # the complete files
    tokens: int = 0  # the number of tokens in the file that is being written
    documents: int = 0  # the number of documents in that file
    open_tokens: int = 0  # the number of tokens in its last document, or 0 if that has ended

    def total(self) -> int:
        """Returns the number of tokens in all files."""
        return self.tokens + sum(file.tokens for file in self.files)


class TokenStore:
    """A token store that is open for reading: a Source.

    Opening it checks the index and the size of every file; `verify` reads everything. index: the index of a store that another
    process has already opened; each file is then opened and checked when it is first read. Raises UserError, with file and
    problem in the message, if the store is damaged.
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
        # {index of a file that was read: (its tokens, the starts of its documents)}
        self._mapped: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        if index is None:
            with ThreadPoolExecutor(OPEN_THREADS) as pool:
                list(pool.map(self.map_file_pair, range(len(self._files))))

    def __reduce__(self) -> tuple[type, tuple[Path, StoreIndex]]:
        return TokenStore, (self.path, self.index)

    @property
    def tokenizer_path(self) -> Path:
        """Returns the folder of the tokenizer. Raises UserError if the store has no tokenizer."""
        path = self.path / "tokenizer"
        if not is_folder(path):
            raise UserError(
                f"{path}: the store has no tokenizer; make it again with get_dataset.py --tokenizer=..."
            )
        return path

    def read(self, start: int, count: int) -> Tokens:
        """Returns the tokens [start, start + count) of the store, which can span several files, with their positions. Raises
        UserError if a file is missing or damaged."""
        assert 0 <= start <= start + count <= self.token_count
        first = min(bisect.bisect_right(self._starts, start), len(self._files)) - 1
        last = max(first, bisect.bisect_left(self._starts, start + count) - 1)
        pieces = [
            self._read_file(number, start, start + count) for number in range(first, last + 1)
        ]
        tokens, positions = zip(*pieces)
        return Tokens(np.concatenate(tokens), np.concatenate(positions))

    def verify(self, only_used: bool = False) -> None:
        """Reads the files and compares their checksums.

        only_used: only verify the files from which this object has read. Raises UserError for the first damaged file."""
        numbers = sorted(self._mapped) if only_used else range(len(self._files))
        for number in numbers:
            file = self._files[number]
            for suffix, checksum in (("bin", file.bin_sha256), ("doc", file.doc_sha256)):
                path = self.path / f"{file.name}.{suffix}"
                if _start_digest(path).hexdigest() != checksum:
                    raise UserError(
                        f"{path}: the content does not match its checksum; copy or make the store again"
                    )

    def _read_file(self, number: int, start: int, end: int) -> Tokens:
        """Returns the part of the store's tokens [start, end) that is in the file with index `number`.

        Raises UserError if the .doc file is damaged."""
        if number not in self._mapped:
            self._mapped[number] = self.map_file_pair(number)
        tokens, starts = self._mapped[number]
        offset = max(start - self._starts[number], 0)
        end = min(end - self._starts[number], len(tokens))
        first = starts.searchsorted(offset, "right") - 1
        inner = starts[first + 1 : starts.searchsorted(end, "left")] - offset
        lengths = np.diff(inner, append=end - offset)
        position = offset - int(starts[first])
        rises = (inner[:1] > 0).all() and (lengths > 0).all()
        if not (rises and 0 <= position < MAX_DOCUMENT):
            raise UserError(
                f"{self.path / self._files[number].name}.doc is damaged: its numbers are not starts of documents; "
                "copy it again or make the store again"
            )
        positions = np.arange(position, position + end - offset, dtype=np.int32)
        if len(inner):
            positions[inner[0] :] -= np.repeat(positions[inner], lengths)
        return Tokens(tokens[offset:end], positions)

    def map_file_pair(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Maps the tokens of a file and the starts of its documents into memory. Raises UserError if a file is missing
        or has the wrong size."""
        file = self._files[number]
        tokens = _map_file(self.path / f"{file.name}.bin", self.dtype, file.tokens)
        starts = _map_file(self.path / f"{file.name}.doc", np.dtype("<i8"), file.documents)
        return tokens, starts


def _map_file(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """Maps a file of `count` numbers into memory. Raises UserError if it is missing, or has another size than in the index."""
    expected = count * dtype.itemsize
    remedy = "copy it again or make the store again"

    try:
        with open_with_retries(path) as file:
            size = file.seek(0, os.SEEK_END)
            if size != expected:
                raise UserError(
                    f"{path}: the file has {size} bytes instead of the {expected} in the index; {remedy}"
                )
            # The memmap is converted to a plain array, because indexing of np.memmap takes microseconds longer.
            return np.asarray(np.memmap(file, dtype, "r"))
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}); {remedy}") from error


@dataclass
class StoreWriter:
    """Writes a token store. After `flush`, everything that `state` counts is on the disk, and a new writer can resume from it.

    Raises OSError if writing fails. Raises UserError for documents with 2**31 tokens or more, and if a file is shorter than
    `state` records.
    """

    path: Path
    vocab_size: int
    eos: int  # -1: unknown
    tokenizer: str  # the identity of the tokenizer, see tokenizer.py; "": unknown
    shard_tokens: int = DatasetConfig.shard_tokens
    # True: files end at the end of a document. False: tokens are split between files anywhere, and the rest of a file after
    # its last eos counts as a document.
    whole: bool = True
    # The state of an earlier writer, to resume from.
    state: WriterState = field(default_factory=WriterState)

    def __post_init__(self) -> None:
        assert -1 <= self.eos < self.vocab_size <= 1 << 32 and self.shard_tokens > 0
        self.dtype = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")
        # The last parts of the .bin and the .doc file that `state` counts. They are kept until they are on the disk, because a
        # failed flush can lose any part of them.
        self._unwritten = [bytearray(), bytearray()]
        # The SHA-256 of the part of both files that `state` counts. The list is empty before the first token of a file.
        self._digests: list[Any] = []
        make_folder(self.path, parents=True)

    def append(self, tokens: ArrayLike) -> None:
        """Appends tokens. Each eos ends a document. If the last document has no eos, the next call continues it.

        tokens: integers (n,)."""
        tokens = np.asarray(tokens)
        assert not len(tokens) or 0 <= tokens.min() <= tokens.max() < self.vocab_size
        while len(tokens):
            end = max(1, self.shard_tokens - self.state.tokens)
            if self.whole:  # the file ends with the document that reaches shard_tokens
                document_ends = np.flatnonzero(tokens[end - 1 :] == self.eos)
                if len(document_ends):
                    end += int(document_ends[0])
                else:
                    end = len(tokens) + 1
            self._write(tokens[:end])
            if end <= len(tokens):
                self._finish_file()
            tokens = tokens[end:]

    def flush(self, are_complete: bool = False) -> None:
        """Writes everything that `state` counts to the disk.

        are_complete: whether both files are complete. Only then they are truncated: if a process that seemed to be dead is
        still running, it writes the same bytes at the same place as this process.
        """
        for (path, size), content in zip(self._files(), self._unwritten):
            if content or are_complete:
                write_part(path, size - len(content), content, are_complete)
            content.clear()

    def finish_files(self) -> list[StoreFile]:
        """Completes the last file. Returns the entries of all files for the index."""
        assert not (self.whole and self.state.open_tokens), "the last document has no end"
        if self.state.tokens:
            self._finish_file()
        return self.state.files

    def finish(self) -> TokenStore:
        """Completes the last file and writes the index, which makes the folder a store. Returns the opened store."""
        files = self.finish_files()
        assert files, "a store needs at least one document"
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

    def _files(self) -> Iterator[tuple[Path, int]]:
        """Yields the path of the current .bin and .doc file, and the bytes of each that `state` counts."""
        path = self.path / f"{len(self.state.files):05d}"
        yield path.with_suffix(".bin"), self.state.tokens * self.dtype.itemsize
        yield path.with_suffix(".doc"), self.state.documents * 8

    def _start_digests(self) -> None:
        """Computes the checksums of the part of both files that an earlier writer has written.

        Raises UserError if a file is shorter than this part."""
        if self._digests:
            return
        for path, size in self._files():
            if size_of(path) < size:
                raise UserError(
                    f"{path}: the file is shorter than recorded; start again with --overwrite"
                )
            self._digests.append(_start_digest(path, size))

    def _write(self, tokens: np.ndarray) -> None:
        state = self.state
        ends = np.flatnonzero(tokens == self.eos) + 1
        starts = ends[ends < len(tokens)]
        if not state.open_tokens:
            starts = np.append(0, starts)
        lengths = np.diff(ends, prepend=-state.open_tokens, append=len(tokens))
        if lengths.max() > MAX_DOCUMENT:
            raise UserError(
                f"{self.path}: a document has {lengths.max()} tokens, more than {MAX_DOCUMENT}; split it into "
                "smaller documents"
            )
        self._start_digests()
        contents = [
            tokens.astype(self.dtype).tobytes(),
            (starts + state.tokens).astype("<i8").tobytes(),
        ]
        for unwritten, digest, content in zip(self._unwritten, self._digests, contents):
            unwritten += content
            digest.update(content)
        state.tokens += len(tokens)
        state.documents += len(starts)
        state.open_tokens = int(lengths[-1])
        if len(self._unwritten[0]) > MAX_UNWRITTEN:
            self.flush()

    def _finish_file(self) -> None:
        self._start_digests()
        self.flush(are_complete=True)
        state = self.state
        name = FileName(f"{len(state.files):05d}")
        bin_sha256, doc_sha256 = [digest.hexdigest() for digest in self._digests]
        self._digests = []
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
            raise ValueError(f"unknown dtype {index.dtype}")
        return index
    except ValueError as error:
        raise UserError(
            f"{path} is damaged ({error}); copy it again or make the store again"
        ) from error


def _checksum(index: dict[str, Any]) -> str:
    """Returns the checksum of all fields of index.json except for the checksum itself."""
    content = {name: value for name, value in index.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _start_digest(path: Path, size: int = 1 << 63) -> Any:
    """Returns a SHA-256 object of the first `size` bytes of a file; more data can be added to it. Raises OSError if
    the file can't be read."""
    digest = hashlib.sha256()
    if not size:  # the file need not exist
        return digest
    with open_with_retries(path) as file:
        while block := file.read(min(size, 1 << 20)):
            digest.update(block)
            size -= len(block)
    return digest
