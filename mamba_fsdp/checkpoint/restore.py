"""Finds the newest whole checkpoint, and loads it into the shards of a model and its optimiser."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mamba_fsdp.checkpoint.contents import (
    Checksum,
    Contents,
    FileChecksum,
    check_size,
    checksums_or_problem,
    read_contents,
)
from mamba_fsdp.checkpoint.files import Filled, hash_file
from mamba_fsdp.checkpoint.folder import Reader, check_same_tensors, stored_name
from mamba_fsdp.checkpoint.ranges import gaps
from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run.layout import committed, no_checkpoint, removed
from mamba_fsdp.run.names import CHECKPOINTS, COMMIT, STATE
from mamba_fsdp.storage.patience import exists, retry_io

# Raises UserError for the state of a checkpoint that must not be loaded.
Check = Callable[[dict[str, Any], Path], None]


@dataclass
class WholeCheckpoint:
    """A checkpoint that was verified."""

    path: Path
    broken: list[str] = field(default_factory=list)  # names of newer ones that were passed over
    filled: Filled = field(default_factory=dict)  # what verifying put into this rank's shards


@dataclass
class Restored:
    """A checkpoint that is in the shards."""

    path: Path
    state: dict[str, Any]  # what the training loop saved with it


def verify(
    checkpoint: Path,
    world: World,
    part: str = "all",
    shards: Sequence[Shard] = (),
    filled: Filled | None = None,
) -> list[str]:
    """Returns on all ranks what is wrong with a committed checkpoint, in sentences: compares its files with the sizes
    and checksums in COMMIT. All ranks call it and share the files, so that one of them reads each byte.

    part: "all", or only "model", its weights, or "state", state.json. shards: a rank fills in its own elements while it
    reads, whatever the result, and notes them in `filled`, so that `load` need not read them again; if as many ranks
    saved the checkpoint, they are all. Raises UserError on all ranks for another version.
    """
    checksums, problems = world.on_rank0(checksums_or_problem, checkpoint)
    names = sorted(name for name in checksums if part != "state" or name == STATE)
    first = len(names) * world.rank // world.size
    stop = len(names) * (world.rank + 1) // world.size
    shards_by_name = {stored_name(shard.name): shard for shard in shards}
    ranges_by_name: Filled = {} if filled is None else filled

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


def newest_whole(
    checkpoints: Path,
    world: World,
    report: Callable[[str], Any],
    part: str = "all",
    shards: Sequence[Shard] = (),
) -> WholeCheckpoint | None:
    """Returns the newest checkpoint with a whole `part`; reports and skips broken ones. part, shards: see
    verify.

    Raises UserError if there are committed checkpoints but none is whole: a new start must be the user's decision.
    """
    broken: list[str] = []
    problems: list[str] = []
    candidates = world.on_rank0(committed, checkpoints)
    for checkpoint in reversed(candidates):
        whole = WholeCheckpoint(checkpoint, broken)
        problems = verify(checkpoint, world, part, shards, whole.filled)
        if not problems:
            return whole
        if not world.on_rank0(exists, checkpoint):
            # The checkpoint's run has removed it since, and has newer ones.
            return newest_whole(checkpoints, world, report, part, shards)
        broken.append(checkpoint.name)
        if world.rank == 0:
            report(
                f"warning: checkpoint {checkpoint} is broken and is skipped: {'; '.join(problems)}"
            )
    if candidates:
        raise UserError(
            f"none of the checkpoints in {checkpoints} ({len(candidates)}) is whole, the oldest: "
            f"{'; '.join(problems)}; repair one, or move the folder away to start from scratch"
        )
    return None


def find_checkpoint(
    path: str | Path,
    world: World,
    report: Callable[[str], Any] = print,
    part: str = "all",
    shards: Sequence[Shard] = (),
) -> WholeCheckpoint:
    """Returns the checkpoint that `path` names, the same on all ranks: itself, or the newest whole one of a run folder.

    Raises UserError if there is none, or if the one that `path` names is broken. part, shards: see `verify`.
    """
    path = Path(path)
    if world.on_rank0(exists, path / COMMIT):
        named = WholeCheckpoint(path)
        problems = verify(path, world, part, shards, named.filled)
        if problems and not world.on_rank0(exists, path):
            raise removed(path)
        if problems:
            raise UserError(f"checkpoint {path} is broken: {'; '.join(problems)}")
        return named
    folder = path
    if exists(path / CHECKPOINTS):
        folder = path / CHECKPOINTS
    newest = newest_whole(folder, world, report, part, shards)
    if newest is None:
        raise no_checkpoint(path)
    return newest


def load(
    whole: WholeCheckpoint, shards: Sequence[Shard], world: World, check: Check | None = None
) -> Restored:
    """Fills `shards`, of any strategy and world size, from a checkpoint, except what verifying it has filled already.

    The checkpoint must hold exactly these tensors of the model, and of the optimiser if its shards are among them.
    check(state, checkpoint) may refuse first, on rank 0. Raises UserError on all ranks if any can't load.
    """
    contents = world.on_rank0(_read_checked, whole.path, shards, check)
    reader = Reader(whole.path, contents)

    def fill() -> None:
        for shard in shards:
            name = stored_name(shard.name)
            end = shard.start + len(shard.data)
            for start, stop in gaps(shard.start, end, whole.filled.get(name, ())):
                target = shard.data[start - shard.start : stop - shard.start]
                target.copy_(reader.read(name, start, stop))

    world.on_all_ranks(fill)
    return Restored(whole.path, contents.state)


def _read_checked(checkpoint: Path, shards: Sequence[Shard], check: Check | None) -> Contents:
    """Returns the contents of a checkpoint that fits the shards. Raises UserError if it does not."""
    contents = read_contents(checkpoint)
    if check:
        check(contents.state, checkpoint)
    wanted = {stored_name(shard.name): shard.shape for shard in shards}
    kinds = {name.split("/")[0] for name in wanted}
    stored = {
        name: tensor.shape
        for name, tensor in contents.tensors.items()
        if name.split("/")[0] in kinds
    }
    check_same_tensors(checkpoint, wanted, stored)
    return contents
