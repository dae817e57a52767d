"""Reads what a checkpoint says of itself: COMMIT and state.json, and whether its files are there. Without torch."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamba_fsdp.checkpoint.ranges import TensorRanges, is_cut
from mamba_fsdp.errors import UserError
from mamba_fsdp.run.layout import removed, step_of
from mamba_fsdp.run.names import COMMIT, STATE
from mamba_fsdp.storage.formats import CHECKPOINT
from mamba_fsdp.storage.patience import exists, read_bytes, stat_of
from mamba_fsdp.storage.typed_json import FileName, from_json, parse_object

DTYPES = {"F64", "F32", "F16", "BF16"}  # keys of conventions.SAFETENSORS_DTYPES
# Exceptions that damaged content can raise.
BAD_CONTENT = (EOFError, ValueError, LookupError, TypeError, AttributeError, OverflowError)


@dataclass
class Checksum:
    """The size of a file, or of its first part, and the checksum of those bytes."""

    bytes: int
    xxh3: str


@dataclass
class FileChecksum(Checksum):
    """An entry of COMMIT, about one file."""

    model: Checksum | None = None  # of a rank's file: its first part, which holds the model


@dataclass
class Commit:
    """The content of COMMIT, which is written last: a folder without it is not a checkpoint."""

    step: int
    files: dict[FileName, FileChecksum]

    def __post_init__(self) -> None:
        if STATE not in self.files:
            raise ValueError(f"files lacks {STATE}")


@dataclass
class StoredTensor:
    """An entry of state.json, about one tensor."""

    shape: list[int]
    dtype: str  # one of DTYPES
    ranges: int  # the number of its TensorRanges

    def element_count(self) -> int:
        return math.prod(self.shape)


@dataclass
class Contents:
    """The content of state.json."""

    step: int
    state: dict[str, Any]  # what the program reads when it resumes
    files: list[FileName]
    ranges: list[TensorRanges]
    tensors: dict[str, StoredTensor]  # by stored name

    def check(self) -> None:
        """Raises ValueError if a number is out of range, or pieces do not make up their tensor."""
        for ranges in self.ranges:
            has_files = len(ranges.starts) == len(ranges.files)
            if not has_files or max(ranges.files, default=0) >= len(self.files):
                raise ValueError("a piece is in no file that is listed")
        whole = set()
        for name, tensor in self.tensors.items():
            if tensor.dtype not in DTYPES or tensor.ranges >= len(self.ranges):
                raise ValueError(f"{name} has an unknown dtype or unknown ranges")
            cut = (tensor.ranges, tensor.element_count())
            if cut not in whole and not is_cut(self.ranges[cut[0]].starts, cut[1]):
                raise ValueError(f"the pieces of {name} do not cover the whole tensor")
            whole.add(cut)


class BrokenError(UserError):
    """The error if a checkpoint is not what was written."""


@contextlib.contextmanager
def _broken_where_odd(name: str) -> Iterator[None]:
    """Raises BrokenError if the block finds that the file `name` can't be read or is not as it was written."""
    try:
        yield
    except OSError as error:
        raise BrokenError(f"{name}: {error.strerror}") from None
    except ValueError as error:
        raise BrokenError(f"{name} is not what was written ({error})") from None


def _read(path: Path) -> dict[str, Any]:
    return parse_object(read_bytes(path))


def read_commit(checkpoint: Path) -> Commit:
    """Returns the content of COMMIT.

    Raises BrokenError if that is not what was written, or is another step's; UserError if another version of this
    program wrote it: then it is not broken, and an older checkpoint is no substitute.
    """
    with _broken_where_odd(COMMIT):
        content = _read(checkpoint / COMMIT)
        # COMMIT has no checksum of its own, and a flipped bit must not pass for another version.
        if not CHECKPOINT.reads(content) and CHECKPOINT.reads(_read(checkpoint / STATE)):
            raise BrokenError(f"{COMMIT} is damaged: its format or version is not that of {STATE}")
        commit = from_json(Commit, CHECKPOINT.body(checkpoint / COMMIT, content))
        _check_step(checkpoint, COMMIT, commit.step)
    return commit


def _check_step(checkpoint: Path, name: str, step: int) -> None:
    """Raises BrokenError if a file is of another step than the folder's name says. A folder may have a name of its
    own."""
    if step_of(checkpoint.name) not in (None, step):
        raise BrokenError(f"{name} is of step {step}, but the folder's name says another")


def read_contents(checkpoint: Path) -> Contents:
    """Returns the content of a checkpoint's state.json. Raises BrokenError, and UserError for another version."""
    path = checkpoint / STATE
    try:
        with _broken_where_odd(STATE):
            contents = from_json(Contents, CHECKPOINT.body(path, _read(path)))
            contents.check()
            _check_step(checkpoint, STATE, contents.step)
    except BrokenError as error:
        if not exists(checkpoint):
            raise removed(checkpoint) from None
        raise BrokenError(f"checkpoint {checkpoint} is broken: {error}") from None
    return contents


def checksums_or_problem(checkpoint: Path) -> tuple[dict[FileName, FileChecksum], list[str]]:
    """Returns (the checksums in COMMIT, []), or ({}, what is wrong with it). Raises UserError for another version."""
    try:
        return read_commit(checkpoint).files, []
    except BrokenError as error:
        return {}, [str(error)]


def verify_sizes(checkpoint: Path) -> list[str]:
    """Returns what is wrong with a committed checkpoint, in sentences, as far as the sizes of its files tell. Raises
    UserError for another version."""
    checksums, problems = checksums_or_problem(checkpoint)
    for name, checksum in sorted(checksums.items()):
        problem = check_size(checkpoint / name, checksum)
        if problem:
            problems.append(problem)
    return problems


def check_size(path: Path, checksum: FileChecksum) -> str:
    """Returns what is wrong with the size of a file that has this checksum in COMMIT; "" if nothing is."""
    try:
        size = stat_of(path).st_size
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if size != checksum.bytes:
        return f"{path.name} has {size} bytes, not {checksum.bytes}"
    return ""
