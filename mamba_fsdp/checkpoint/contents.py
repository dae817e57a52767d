"""Reads the metadata of a checkpoint, COMMIT and state.json, and checks the sizes of its files.

This module does not import torch.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamba_fsdp.checkpoint.ranges import TensorRanges, is_partition
from mamba_fsdp.errors import UserError
from mamba_fsdp.run.layout import checkpoint_removed_error, step_name, step_of
from mamba_fsdp.run.names import COMMIT, STATE
from mamba_fsdp.storage.formats import CHECKPOINT
from mamba_fsdp.storage.retry import exists, read_bytes, stat_of
from mamba_fsdp.storage.typed_json import FileName, from_json, parse_object

DTYPES = {"F64", "F32", "F16", "BF16"}  # keys of conventions.SAFETENSORS_DTYPES
# Exceptions that reading a damaged file can raise.
CORRUPTION_ERRORS = (EOFError, ValueError, LookupError, TypeError, AttributeError, OverflowError)


@dataclass
class Checksum:
    """The size in bytes and the checksum of a file, or of its first part."""

    bytes: int
    xxh3: str


@dataclass
class FileChecksum(Checksum):
    """The entry of one file in COMMIT."""

    model: Checksum | None = None  # the first part of a rank's file, with the pieces of the model


@dataclass
class Commit:
    """The content of COMMIT. This file is written last, so a folder without it is not a checkpoint."""

    step: int
    files: dict[FileName, FileChecksum]

    def __post_init__(self) -> None:
        if STATE not in self.files:
            raise ValueError(f"its list of files lacks {STATE}")


@dataclass
class StoredTensor:
    """The entry of one tensor in state.json."""

    shape: list[int]
    dtype: str  # one of DTYPES
    ranges: int  # index of its TensorRanges in Contents.ranges

    def element_count(self) -> int:
        return math.prod(self.shape)


@dataclass
class Contents:
    """The content of state.json."""

    step: int
    state: dict[str, Any]  # the fields of a SavedRun
    files: list[FileName]
    ranges: list[TensorRanges]
    tensors: dict[str, StoredTensor]  # {stored name: tensor}

    def check(self) -> None:
        """Raises ValueError if a dtype or an index is invalid, or if the pieces of a tensor do not cover it."""
        checked = set()
        for name, tensor in self.tensors.items():
            if tensor.dtype not in DTYPES or tensor.ranges >= len(self.ranges):
                raise ValueError(f"{name} has an unknown dtype or unknown ranges")
            cut = (tensor.ranges, tensor.element_count())
            if cut in checked:
                continue
            ranges = self.ranges[tensor.ranges]
            if len(ranges.starts) != len(ranges.files):
                raise ValueError(f"not every piece of {name} has a file")
            last_file = max(ranges.files, default=0)
            if last_file >= len(self.files):
                raise ValueError(
                    f"a piece of {name} is in file {last_file}, but only {len(self.files)} are listed"
                )
            if not is_partition(ranges.starts, cut[1]):
                raise ValueError(f"the pieces of {name} do not cover the whole tensor")
            checked.add(cut)


class BrokenCheckpointError(UserError):
    """The error for a checkpoint that is damaged."""


@contextlib.contextmanager
def _raise_if_corrupt(name: str) -> Iterator[None]:
    """Raises BrokenCheckpointError if the block can't read the file `name`, or finds that it is damaged."""
    try:
        yield
    except OSError as error:
        raise BrokenCheckpointError(f"{name}: {error.strerror}") from None
    except ValueError as error:
        raise BrokenCheckpointError(f"{name} is damaged ({error})") from None


def _read(path: Path) -> dict[str, Any]:
    return parse_object(read_bytes(path))


def read_commit(checkpoint: Path) -> Commit:
    """Returns the content of COMMIT.

    Raises BrokenCheckpointError if COMMIT is damaged or belongs to another step. Raises UserError if another
    version of this program wrote the checkpoint. Such a checkpoint is not damaged, and must not be replaced by an
    older one.
    """
    with _raise_if_corrupt(COMMIT):
        content = _read(checkpoint / COMMIT)
        # COMMIT does not have a checksum, and a flipped bit must not be mistaken for another version of the format.
        if not CHECKPOINT.reads(content) and CHECKPOINT.reads(_read(checkpoint / STATE)):
            raise BrokenCheckpointError(
                f"{COMMIT} is damaged: its format or version differs from {STATE}"
            )
        commit = from_json(Commit, CHECKPOINT.body(checkpoint / COMMIT, content))
        _check_step(checkpoint, COMMIT, commit.step)
    return commit


def _check_step(checkpoint: Path, name: str, step: int) -> None:
    """Raises BrokenCheckpointError if the folder is named after another step.

    A folder whose name contains no step is accepted, because the user can have renamed it.
    """
    if step_of(checkpoint.name) not in (None, step):
        raise BrokenCheckpointError(
            f"{name} is of step {step}, but its folder is named {checkpoint.name}; rename the folder to {step_name(step)}"
        )


def read_contents(checkpoint: Path) -> Contents:
    """Returns the content of a checkpoint's state.json.

    Raises BrokenCheckpointError if state.json is damaged. Raises UserError if another version of this program wrote
    it, or if the checkpoint has been removed.
    """
    path = checkpoint / STATE
    try:
        with _raise_if_corrupt(STATE):
            contents = from_json(Contents, CHECKPOINT.body(path, _read(path)))
            contents.check()
            _check_step(checkpoint, STATE, contents.step)
    except BrokenCheckpointError as error:
        if not exists(checkpoint):
            raise checkpoint_removed_error(checkpoint) from None
        raise BrokenCheckpointError(
            f"checkpoint {checkpoint} is broken: {error}; use another checkpoint"
        ) from None
    return contents


def try_read_checksums(checkpoint: Path) -> tuple[dict[FileName, FileChecksum], list[str]]:
    """Returns (checksums in COMMIT, problems). If COMMIT is damaged, the checksums are empty.

    Raises UserError if another version of this program wrote it.
    """
    try:
        return read_commit(checkpoint).files, []
    except BrokenCheckpointError as error:
        return {}, [str(error)]


def verify_sizes(checkpoint: Path) -> list[str]:
    """Compares the sizes of a checkpoint's files with COMMIT, and returns a message for each problem.

    Raises UserError if another version of this program wrote the checkpoint.
    """
    checksums, problems = try_read_checksums(checkpoint)
    for name, checksum in sorted(checksums.items()):
        problem = check_size(checkpoint / name, checksum)
        if problem:
            problems.append(problem)
    return problems


def check_size(path: Path, checksum: FileChecksum) -> str:
    """Compares the size of a file with its entry in COMMIT. Returns a message if the size differs, else ""."""
    try:
        size = stat_of(path).st_size
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if size != checksum.bytes:
        return f"{path.name} has {size} bytes, not {checksum.bytes}"
    return ""
