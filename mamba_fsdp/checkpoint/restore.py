"""Finds the newest whole checkpoint, and loads it into the shards of a model and its optimiser."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mamba_fsdp.checkpoint.contents import (
    BrokenError,
    Checksum,
    Contents,
    FileChecksum,
    check_size,
    checksums_or_problem,
    read_commit,
    read_contents,
)
from mamba_fsdp.checkpoint.files import Filled, hash_file
from mamba_fsdp.checkpoint.folder import Reader, check_same_tensors, stored_name
from mamba_fsdp.checkpoint.ranges import gaps
from mamba_fsdp.errors import UserError
from mamba_fsdp.importing.kinds import unexpected_path_error
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run.layout import committed, removed
from mamba_fsdp.run.names import CHECKPOINTS, COMMIT, STATE
from mamba_fsdp.storage.patience import exists, is_folder, retry_io
from mamba_fsdp.storage.typed_json import FileName

Report = Callable[[str], Any]


@dataclass(frozen=True)
class Found:
    """A committed checkpoint whose COMMIT and state.json are whole; its other files may yet be broken."""

    path: Path
    checksums: dict[FileName, FileChecksum]
    contents: Contents
    broken: Mapping[str, str]  # {name: why} of newer ones that were passed over


@dataclass
class WholeCheckpoint:
    """A checkpoint that was verified."""

    path: Path
    contents: Contents
    broken: Sequence[str] = ()  # names of newer ones that were passed over
    filled: Filled = field(default_factory=dict)  # what verifying put into this rank's shards


def verify(checkpoint: Path, world: World) -> list[str]:
    """Returns what is wrong with a committed checkpoint, see `verify_files`. Raises UserError on all ranks for one of
    another version."""
    checksums, problems = world.on_rank0(checksums_or_problem, checkpoint)
    return problems or verify_files(checkpoint, checksums, world)


def verify_files(
    checkpoint: Path,
    checksums: Mapping[FileName, FileChecksum],
    world: World,
    part: str = "all",
    shards: Sequence[Shard] = (),
    filled: Filled | None = None,
) -> list[str]:
    """Returns on all ranks what is wrong with the files of a checkpoint, in sentences: compares them with the sizes and
    checksums in COMMIT. All ranks call it and share the files, so that one of them reads each byte.

    part: "all", or only "model", its weights, or "state", state.json. shards: a rank fills in its own elements while it
    reads, whatever the result, and notes them in `filled`, so that `load` need not read them again; if as many ranks
    saved the checkpoint, they are all.
    """
    names = sorted(name for name in checksums if part != "state" or name == STATE)
    first = len(names) * world.rank // world.size
    stop = len(names) * (world.rank + 1) // world.size
    shards_by_name = {stored_name(shard.name): shard for shard in shards}
    ranges_by_name: Filled = {} if filled is None else filled
    problems = []

    def verify_share() -> None:
        for name in names[first:stop]:
            path = checkpoint / name
            problem = _verify_file(path, checksums[name], part, shards_by_name, ranges_by_name)
            if problem:
                problems.append(problem)

    world.on_all_ranks(verify_share)
    return sorted(world.gather_unique(problems))


def _verify_file(
    path: Path, checksum: FileChecksum, part: str, shards: Mapping[str, Shard], filled: Filled
) -> str:
    """Returns what is wrong with a file, or with the part of it that has this checksum in COMMIT; "" if nothing is.
    Adds the ranges of the shards that it has filled to `filled`."""
    expected: Checksum = checksum
    if part == "model" and checksum.model:
        expected = checksum.model
    problem = check_size(path, checksum)
    if problem:
        return problem
    try:
        result = retry_io(partial(hash_file, path, expected.bytes, shards), path)
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if result.xxh3 != expected.xxh3:
        return f"the content of {path.name} has changed since it was written"
    for name, ranges in result.filled.items():
        filled.setdefault(name, []).extend(ranges)
    return ""


def find_newest(path: Path, report: Report, broken: Mapping[str, str] = {}) -> Found:
    """Returns the checkpoint that `path` names: itself, or the newest of a run folder that is not among the `broken`
    ones, {name: why}. One process calls it. Reports those that it passes over.

    Raises UserError if there is none, or if all are broken: a new start must be the user's decision.
    """
    checkpoint = _newest_candidate(path, broken)
    try:
        checksums = read_commit(checkpoint).files
        problem = _verify_file(checkpoint / STATE, checksums[FileName(STATE)], "all", {}, {})
    except BrokenError as error:
        problem = str(error)
    if problem:
        return pass_over(path, report, broken, checkpoint, problem)
    return Found(checkpoint, checksums, read_contents(checkpoint), broken)


def _newest_candidate(path: Path, broken: Mapping[str, str]) -> Path:
    if exists(path / COMMIT):
        return path
    folder = path / CHECKPOINTS if is_folder(path / CHECKPOINTS) else path
    candidates = committed(folder)
    left = [checkpoint for checkpoint in candidates if checkpoint.name not in broken]
    if left:
        return left[-1]
    if not candidates:
        raise unexpected_path_error(path, "a run with a checkpoint")
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


def find_checkpoint(
    path: str | Path,
    world: World,
    report: Report = print,
    part: str = "all",
    shards: Sequence[Shard] = (),
    found: Found | None = None,
) -> WholeCheckpoint:
    """Returns the checkpoint that `path` names, the same on all ranks: itself, or the newest whole one of a run folder.

    found: what `find_newest` returned on rank 0, if it was asked already. Raises UserError if there is none, or if the
    one that `path` names is broken. part, shards: see `verify_files`.
    """
    path = Path(path)
    if not found:
        found = world.on_rank0(find_newest, path, report)
    while True:
        filled: Filled = {}
        problems = verify_files(found.path, found.checksums, world, part, shards, filled)
        if not problems:
            return WholeCheckpoint(found.path, found.contents, list(found.broken), filled)
        why = "; ".join(problems)
        found = world.on_rank0(pass_over, path, report, found.broken, found.path, why)


def load(whole: WholeCheckpoint, shards: Sequence[Shard], world: World) -> None:
    """Fills `shards`, of any strategy and world size, from a checkpoint, except what verifying it has filled already.

    The checkpoint must hold exactly these tensors of the model, and of the optimiser if its shards are among them.
    Raises UserError on all ranks if any can't load.
    """
    _check_tensors(whole, shards)
    reader = Reader(whole.path, whole.contents)

    def fill() -> None:
        for shard in shards:
            name = stored_name(shard.name)
            end = shard.start + len(shard.data)
            for start, stop in gaps(shard.start, end, whole.filled.get(name, ())):
                target = shard.data[start - shard.start : stop - shard.start]
                target.copy_(reader.read(name, start, stop))

    world.on_all_ranks(fill)


def _check_tensors(whole: WholeCheckpoint, shards: Sequence[Shard]) -> None:
    """Raises UserError, the same on each rank, if a checkpoint does not fit the shards."""
    wanted = {stored_name(shard.name): shard.shape for shard in shards}
    kinds = {name.split("/")[0] for name in wanted}
    stored = {
        name: tensor.shape
        for name, tensor in whole.contents.tensors.items()
        if name.split("/")[0] in kinds
    }
    check_same_tensors(whole.path, wanted, stored)
