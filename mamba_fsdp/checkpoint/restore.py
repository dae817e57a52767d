"""Which checkpoint is whole, which is the newest, and putting one into the shards of a model and its optimiser."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mamba_fsdp.checkpoint.contents import Contents, check_size, commit_or_problem, read_state
from mamba_fsdp.checkpoint.files import Filled, hash_file
from mamba_fsdp.checkpoint.folder import Reader, check_same_tensors, stored_name
from mamba_fsdp.checkpoint.ranges import gaps
from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run_layout import CHECKPOINTS, COMMIT, STATE, committed, no_checkpoint, removed
from mamba_fsdp.storage import exists, retry_io

# Raises UserError for the state of a checkpoint that must not be loaded.
Check = Callable[[dict[str, Any], Path], None]


@dataclass
class Choice:
    """A whole checkpoint."""

    path: Path
    broken: list[str] = field(default_factory=list)  # names of newer ones that were passed over
    filled: Filled = field(default_factory=dict)  # what this rank has put into its shards already


@dataclass
class Restored:
    """A checkpoint that is in the shards."""

    path: Path
    state: dict[str, Any]  # what the loop saved with it


def verify(
    checkpoint: Path,
    world: World,
    part: str = "all",
    shards: Sequence[Shard] = (),
    filled: Filled | None = None,
) -> list[str]:
    """Compares the files of a committed checkpoint with the sizes and checksums in COMMIT. Called by all ranks, which
    share the files: each byte is read by one of them. Returns on all what is wrong, in sentences.

    part: "all", or only "model", its weights, or "state", state.json. shards: what a rank reads of its own is put into
    them on the way, whatever the verdict, and noted in `filled`, so that `load` need not read it again; where as many
    ranks have written, that is all of it. Raises UserError on all ranks for one of another version.
    """
    files, problems = world.on_rank0(commit_or_problem, checkpoint)
    names = sorted(name for name in files if part != "state" or name == STATE)
    first = len(names) * world.rank // world.size
    stop = len(names) * (world.rank + 1) // world.size
    wanted = {stored_name(shard.name): shard for shard in shards}

    def verify_mine():
        for name in names[first:stop]:
            problem = _verify_file(checkpoint / name, files[name], part, wanted, filled)
            if problem:
                problems.append(problem)

    world.on_all_ranks(verify_mine)
    return sorted(world.gather_unique(problems))


def _verify_file(path, entry, part, shards, filled):
    """What is wrong with a file of which COMMIT has `entry`, or with that part of it; "" for nothing. Adds what it has
    put into the shards to `filled`."""
    expected = entry.get("model", entry) if part == "model" else entry
    problem = check_size(path, entry)
    if problem:
        return problem
    try:
        read = retry_io(partial(hash_file, path, expected["bytes"], shards), path)
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if read.digest != expected["xxh3"]:
        return f"the content of {path.name} has changed since it was written"
    for name, ranges in read.filled.items():
        filled.setdefault(name, []).extend(ranges)
    return ""


def newest_whole(
    checkpoints: Path,
    world: World,
    report: Callable[[str], Any],
    part: str = "all",
    shards: Sequence[Shard] = (),
) -> Choice | None:
    """The newest checkpoint whose `part` is whole; broken ones are reported and passed over. part, shards: see verify.

    Raises UserError if there are committed checkpoints but none is whole: a new start must be the user's decision.
    """
    broken: list[str] = []
    problems: list[str] = []
    candidates = world.on_rank0(committed, checkpoints)
    for checkpoint in reversed(candidates):
        choice = Choice(checkpoint, broken)
        problems = verify(checkpoint, world, part, shards, choice.filled)
        if not problems:
            return choice
        if not world.on_rank0(exists, checkpoint):
            # Its run has removed it meanwhile, and has newer ones.
            return newest_whole(checkpoints, world, report, part, shards)
        broken.append(checkpoint.name)
        if world.rank == 0:
            report(
                f"warning: checkpoint {checkpoint} is broken and is skipped: {'; '.join(problems)}"
            )
    if candidates:
        raise UserError(
            f"none of the {len(candidates)} checkpoints in {checkpoints} is whole, the oldest: "
            f"{'; '.join(problems)}; repair one, or move the folder away to start from scratch"
        )
    return None


def find_checkpoint(
    path: str | Path,
    world: World,
    report: Callable[[str], Any] = print,
    part: str = "all",
    shards: Sequence[Shard] = (),
) -> Choice:
    """The checkpoint that `path` means, the same on all ranks: itself, or the newest whole one of a run folder.

    Raises UserError where there is none, or where the one that was named is broken. part, shards: see `verify`.
    """
    path = Path(path)
    if world.on_rank0(exists, path / COMMIT):
        choice = Choice(path)
        problems = verify(path, world, part, shards, choice.filled)
        if problems and not world.on_rank0(exists, path):
            raise removed(path)
        if problems:
            raise UserError(f"checkpoint {path} is broken: {'; '.join(problems)}")
        return choice
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    newest = newest_whole(folder, world, report, part, shards)
    if newest is None:
        raise no_checkpoint(path)
    return newest


def load(
    choice: Choice, shards: Sequence[Shard], world: World, check: Check | None = None
) -> Restored:
    """Fills `shards`, of any strategy and world size, from a checkpoint: what verifying it has not put there already.

    The checkpoint must hold just these tensors of the model, and of the optimiser if its shards are among them.
    check(state, checkpoint) may refuse first, on rank 0. Raises UserError on all ranks if any can't load.
    """
    contents = world.on_rank0(_read_checked, choice.path, shards, check)
    reader = Reader(choice.path, contents)

    def fill():
        for shard in shards:
            name = stored_name(shard.name)
            end = shard.start + len(shard.data)
            for start, stop in gaps(shard.start, end, choice.filled.get(name, ())):
                target = shard.data[start - shard.start : stop - shard.start]
                target.copy_(reader.read(name, start, stop))

    world.on_all_ranks(fill)
    return Restored(choice.path, contents.state)


def _read_checked(checkpoint, shards, check) -> Contents:
    """The contents of a checkpoint that fits; raises UserError if it does not."""
    contents = read_state(checkpoint)
    if check:
        check(contents.state, checkpoint)
    wanted = {stored_name(shard.name): shard.shape for shard in shards}
    kinds = {name.split("/")[0] for name in wanted}
    found = {
        name: entry["shape"]
        for name, entry in contents.tensors.items()
        if name.split("/")[0] in kinds
    }
    check_same_tensors(checkpoint, wanted, found)
    return contents
