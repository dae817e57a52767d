"""Reads what a checkpoint says of itself: COMMIT and state.json, and whether its files are there. Without torch."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamba_fsdp.checkpoint.ranges import TensorRanges, is_cut
from mamba_fsdp.errors import UserError
from mamba_fsdp.run.layout import committed, no_checkpoint, removed, step_of
from mamba_fsdp.run.names import CHECKPOINTS, COMMIT, STATE
from mamba_fsdp.storage.formats import CHECKPOINT
from mamba_fsdp.storage.patience import exists, retry_io
from mamba_fsdp.storage.typed_json import FileName, from_json, parse_object

Report = Callable[[str], Any]
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
    return parse_object(retry_io(path.read_bytes, path))


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
    try:
        return _read_state(checkpoint)
    except BrokenError as error:
        if not exists(checkpoint):
            raise removed(checkpoint) from None
        raise BrokenError(f"checkpoint {checkpoint} is broken: {error}") from None


def _read_state(checkpoint: Path) -> Contents:
    path = checkpoint / STATE
    with _broken_where_odd(STATE):
        contents = from_json(Contents, CHECKPOINT.body(path, _read(path)))
        contents.check()
        _check_step(checkpoint, STATE, contents.step)
    return contents


@dataclass(frozen=True)
class Found:
    """A committed checkpoint, as COMMIT and state.json tell; its other files may yet be broken."""

    path: Path
    checksums: dict[FileName, FileChecksum]
    contents: Contents
    broken: Mapping[str, str]  # {name: why} of newer ones that were passed over


def find_newest(path: Path, report: Report, broken: Mapping[str, str] = {}) -> Found:
    """Returns the checkpoint that `path` names: itself, or the newest of a run folder that is not among the `broken`
    ones, {name: why}. Reports those that it passes over.

    Raises UserError if there is none, or if all are broken: a new start must be the user's decision.
    """
    checkpoint = _newest_candidate(path, broken)
    try:
        commit = read_commit(checkpoint)
        return Found(checkpoint, commit.files, _read_state(checkpoint), broken)
    except BrokenError as error:
        return pass_over(path, report, broken, checkpoint, str(error))


def _newest_candidate(path: Path, broken: Mapping[str, str]) -> Path:
    if exists(path / COMMIT):
        return path
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    candidates = committed(folder)
    left = [checkpoint for checkpoint in candidates if checkpoint.name not in broken]
    if left:
        return left[-1]
    if not candidates:
        raise no_checkpoint(path)
    raise UserError(
        f"none of the checkpoints in {folder} ({len(candidates)}) is whole, the oldest: "
        f"{broken[candidates[0].name]}; repair one, or move the folder away to start from scratch"
    )


def pass_over(
    path: Path, report: Report, broken: Mapping[str, str], checkpoint: Path, problem: str
) -> Found:
    """Returns what `find_newest` does of `path` without this checkpoint, which it reports as broken. Raises UserError if
    `path` names just this one."""
    is_gone = not exists(checkpoint)
    if checkpoint == path:
        raise removed(path) if is_gone else UserError(f"checkpoint {path} is broken: {problem}")
    if is_gone:  # its run has removed it meanwhile, and has newer ones
        return find_newest(path, report, broken)
    report(f"warning: checkpoint {checkpoint} is broken and is skipped: {problem}")
    return find_newest(path, report, {**broken, checkpoint.name: problem})


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
        size = retry_io(path.stat, path).st_size
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if size != checksum.bytes:
        return f"{path.name} has {size} bytes, not {checksum.bytes}"
    return ""
