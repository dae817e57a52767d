"""The Source over files in any foreign format: pieces of memory-mapped files, laid end to end; and the Plan by which a
format's module says what there is.

A piece is a stretch of tokens in a file: a document, to which bos and eos are added as it is read, or, where text was
cut without regard to documents, as much as lies there in a row, taken as it is.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mamba_fsdp.data.source import Tokens, restart
from mamba_fsdp.data.store import map_file
from mamba_fsdp.errors import UserError

LOOK_BACK = 1 << 14  # tokens: where no eos is found in so many, positions count from there
MAPS = 1 << 14  # files mapped at a time: Linux allows 65,530 in all
LAYOUT_BITS = (
    (1 << 16) - 1,
    (1 << 14) - 1,
    1,
)  # DataLayout: token, position, counts in the loss; from the lowest bit on


class Rows(NamedTuple):
    """What lies in a file: its documents or other rows, in order."""

    dtype: str
    offsets: np.ndarray  # (rows,) int64, bytes
    lengths: np.ndarray  # (rows,) int64, tokens


class DataFile(NamedTuple):
    """A file of a source, as it was when its index was made."""

    name: str  # from the source's folder on
    size: int  # bytes
    changed: int  # nanoseconds: its mtime
    dtype: str  # of the tokens
    documents: int  # in the file itself, the empty ones too
    tokens: int  # in the file itself
    pieces: int
    length: int  # tokens, with what is added to documents and without what is stripped
    digest: str  # of the pieces, and of samples of their content


class Plan(NamedTuple):
    """The files of a source and how tokens are made of what lies in them, by its format and the settings."""

    root: Path
    names: list[str]  # from there on
    find_rows: Callable[
        [Path], Rows
    ]  # of a module, so that it can be sent to another process; raises UserError
    documents: (
        bool  # rows are documents, to end with eos; else they are laid end to end as they are
    )
    told: str = ""  # what the user should know of it
    block: int = 0  # of how many tokens each row must be, but the last of a file; 0: of any
    layout: bool = False  # integers of LAYOUT_BITS instead of tokens
    check: Callable[[Sequence[DataFile]], None] | None = (
        None  # raises UserError where they are not as told
    )
    bos: int = -1  # put before each document; -1: none
    eos: int = -1  # -1: not known
    strip: tuple[int, ...] = ()  # tokens to be left out at the ends of documents

    @property
    def added(self) -> int:
        """Tokens, to each document."""
        return (self.bos >= 0) + (self.eos >= 0) if self.documents else 0

    @property
    def key(self) -> str:
        """Equal for what makes equal indexes of equal data."""
        rows: Any = self.find_rows
        made_by = getattr(rows, "func", rows)
        return repr(
            (
                made_by.__module__,
                made_by.__name__,
                getattr(rows, "keywords", {}),
                (self.documents, self.added, self.strip, self.block),
            )
        )

    def sent(self) -> "Plan":
        """What another process needs of it, without what is long or can't be sent."""
        return self._replace(names=[], check=None)


class Pieces(NamedTuple):
    """Where the pieces lie: arrays (pieces,), int64, possibly mapped."""

    starts: np.ndarray  # (pieces + 1,): in the source, with what is added
    offsets: np.ndarray  # bytes from the file's start


class IndexedSource:
    """A Source over `files`. Cheap to pickle where its index is stored: it is mapped again.

    place: Pieces, or the folder that holds them. tokens: what is known of the tokenizer.
    """

    vocab_size = 0

    def __init__(
        self,
        path: Path,
        format: str,
        plan: Plan,
        files: Sequence[DataFile],
        place: "Pieces | Path",
        identity: str,
        tokenizer: tuple[str, str],
    ):
        self._made_of = path, format, plan.sent(), files, place, identity, tokenizer
        self.path, self.format, self.plan, self.files, self._place = (
            path,
            format,
            plan,
            files,
            place,
        )
        self.identity, (self.tokenizer, self._tokenizer_path) = identity, tokenizer
        self.eos = plan.eos
        self._first = [0, *itertools.accumulate(file.pieces for file in files)]
        self._bos, self._eos = (
            (plan.bos, plan.eos) if plan.documents else (-1, -1)
        )  # that are added
        self.token_count = sum(file.length for file in files)
        self.document_count = self._first[-1] if plan.documents else 0
        self._map = functools.lru_cache(MAPS)(functools.partial(_map, plan.root, files))

    def __reduce__(self):
        return IndexedSource, self._made_of

    @functools.cached_property
    def pieces(self) -> Pieces:
        if isinstance(self._place, Pieces):
            return self._place
        return Pieces(
            *(
                map_file(
                    self._place / f"{name}.i64", np.dtype("<i8"), size * 8, "remove the folder"
                )
                for name, size in (("starts", self._first[-1] + 1), ("offsets", self._first[-1]))
            )
        )

    @property
    def tokenizer_path(self) -> Path:
        if not self._tokenizer_path:
            raise UserError(
                f"{self.path}: its tokenizer is not known; name one: --tokenizer=FOLDER"
            )
        return Path(self._tokenizer_path)

    def read(self, start: int, count: int) -> Tokens:
        """As Source has it. The mask is None but of DataLayout, which has one."""
        assert 0 <= start and 0 <= count and start + count <= self.token_count, (
            start,
            count,
            self.token_count,
        )
        values, positions = self._read(start, count)
        if self.plan.layout:
            parts = [values >> shift & bits for shift, bits in zip((0, 16, 30), LAYOUT_BITS)]
            return Tokens(
                parts[0], parts[1], (parts[2] & (parts[1] > 0)).astype(bool)
            )  # no loss on a first token
        if not self.plan.documents:
            positions = self._positions(values, start)
        return Tokens(values, positions, None)

    def _read(self, start, count):
        """(tokens, position of each in its piece) of [start, start + count)."""
        starts, parts = self.pieces.starts, []
        piece = min(int(starts.searchsorted(start, "right")), len(starts) - 1) - 1
        last = max(piece + 1, int(starts.searchsorted(start + count, "left")))
        while piece < last:
            file = bisect.bisect_right(self._first, piece) - 1
            end = min(last, self._first[file + 1])
            part = self._of_file(
                file,
                piece,
                end,
                max(start, int(starts[piece])),
                min(start + count, int(starts[end])),
            )
            if part[0].dtype.kind == "i" and len(part[0]) and part[0].min() < 0:
                raise UserError(
                    f"{self.plan.root / self.files[file].name}: holds {part[0].min()} where a token "
                    "id should stand"
                )
            parts.append(part)
            piece = end
        return parts[0] if len(parts) == 1 else [np.concatenate(columns) for columns in zip(*parts)]

    def _of_file(self, file, piece, end, start, stop):
        """The same of [start, stop), which lies in the pieces [piece, end) of one file."""
        content = self._map(file)
        starts = np.array(self.pieces.starts[piece : end + 1])
        lengths = np.minimum(starts[1:], stop) - np.maximum(starts[:-1], start)
        positions = np.arange(start, stop) - np.repeat(starts[:-1], lengths)
        # What is added reads a neighbour of its document first, or the file's nearest token, and is overwritten then.
        first = self.pieces.offsets[piece:end] // content.itemsize - (self._bos >= 0)
        place = positions + np.repeat(first, lengths)
        values = content.take(place, mode="clip")
        if max(self._bos, self._eos) > np.iinfo(values.dtype).max:
            values = values.astype(np.int64)
        ends = starts[1:] - 1 - start
        if self._eos >= 0:
            values[ends[(0 <= ends) & (ends < stop - start)]] = self._eos
        if self._bos >= 0:
            values[positions == 0] = self._bos
        return values, positions.astype(np.int32)

    def _positions(self, values, start):
        """Of each token in its document, where an eos ends one; without an eos all is one document."""
        before = min(start, LOOK_BACK)
        for size in (
            (min(start, 1 << 10), before) if self.eos >= 0 else ()
        ):  # most documents began just before
            ends: np.ndarray = np.flatnonzero(self._read(start - size, size)[0] == self.eos)
            if len(ends):
                before = size - 1 - int(ends[-1])
                break
        positions = np.arange(before, before + len(values), dtype=np.int32)
        inner: np.ndarray = np.flatnonzero(values[:-1] == self.eos) + 1
        restart(positions, inner)
        return positions


def _map(root, files, number):
    """All of a file, as integers of its tokens' type."""
    file, size = files[number], np.dtype(files[number].dtype).itemsize
    remedy = "it has changed since the run began: put it back, or start again"
    content = map_file(root / file.name, np.dtype(np.uint8), file.size, remedy)
    return content[: len(content) // size * size].view(file.dtype)
