"""Finds the newest undamaged checkpoint, and loads it into the shards of a model and its optimizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mamba_fsdp.checkpoint.contents import (
    BrokenCheckpointError,
    Checksum,
    Contents,
    FileChecksum,
    check_size,
    read_commit,
    read_contents,
    try_read_checksums,
)
from mamba_fsdp.checkpoint.files import FilledRanges, hash_file
from mamba_fsdp.checkpoint.folder import Reader, check_same_tensors, stored_name
from mamba_fsdp.checkpoint.ranges import find_gaps
from mamba_fsdp.errors import UserError
from mamba_fsdp.importing.kinds import unexpected_path_error
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run.layout import checkpoint_removed_error, list_committed
from mamba_fsdp.run.lease import Report
from mamba_fsdp.run.names import CHECKPOINTS, COMMIT, STATE
from mamba_fsdp.storage.retry import exists, is_folder, retry_io
from mamba_fsdp.storage.typed_json import FileName


@dataclass(frozen=True)
class CheckpointCandidate:
    """A committed checkpoint with undamaged COMMIT and state.json. Its other files have not been verified yet."""

    path: Path
    checksums: dict[FileName, FileChecksum]
    contents: Contents
    broken: Mapping[str, str]  # {name: problem} of newer checkpoints that are damaged


@dataclass
class VerifiedCheckpoint:
    """A checkpoint that has been verified."""

    path: Path
    contents: Contents
    broken: Sequence[str] = ()  # names of newer checkpoints that are damaged
    # Elements of this rank's shards that were loaded while the checkpoint was verified.
    filled: FilledRanges = field(default_factory=dict)


def verify(checkpoint: Path, world: World) -> list[str]:
    """Verifies all files of a committed checkpoint, and returns a message for each problem, the same on all ranks.

    Raises UserError on all ranks if another version of this program wrote the checkpoint.
    """
    checksums, problems = world.on_rank0(try_read_checksums, checkpoint)
    return problems or verify_files(checkpoint, checksums, world)


def verify_files(
    checkpoint: Path,
    checksums: Mapping[FileName, FileChecksum],
    world: World,
    only_model: bool = False,
    shards: Sequence[Shard] = (),
    filled: FilledRanges | None = None,
) -> list[str]:
    """Compares the files of a checkpoint with the sizes and checksums in COMMIT. Returns a message for each problem.

    All ranks call it. The files are divided among them, so that each byte is read by one rank. The result is the same
    on all ranks.

    only_model: whether to verify only the weights of the model and state.json. shards: while a rank reads a file, it loads
    the elements of its own shards and adds them to `filled`, so that `load` does not read them again. If the same
    number of ranks saved the checkpoint, these are usually all elements. They are loaded even if the file turns out to
    be damaged.
    """
    names = sorted(checksums)
    first = len(names) * world.rank // world.size
    stop = len(names) * (world.rank + 1) // world.size
    shards_by_name = {stored_name(shard.name): shard for shard in shards}
    ranges_by_name: FilledRanges = {} if filled is None else filled
    problems = []

    def verify_share() -> None:
        for name in names[first:stop]:
            path = checkpoint / name
            problem = _verify_file(
                path, checksums[name], only_model, shards_by_name, ranges_by_name
            )
            if problem:
                problems.append(problem)

    world.on_all_ranks(verify_share)
    return sorted(world.gather_unique(problems))


def _verify_file(
    path: Path,
    checksum: FileChecksum,
    only_model: bool,
    shards: Mapping[str, Shard],
    filled: FilledRanges,
) -> str:
    """Verifies a file, or only its first part with the model. Returns a message if it is damaged; "" if it is not.

    Adds the ranges that were loaded into shards to `filled`.
    """
    expected: Checksum = checksum
    if only_model and checksum.model:
        expected = checksum.model
    problem = check_size(path, checksum)
    if problem:
        return problem
    try:
        result = retry_io(hash_file, path, path, expected.bytes, shards)
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if result.xxh3 != expected.xxh3:
        return f"the content of {path.name} has changed since it was written"
    for name, ranges in result.filled.items():
        filled.setdefault(name, []).extend(ranges)
    return ""


def find_newest_checkpoint(
    path: Path, report: Report, broken: Mapping[str, str] = {}
) -> CheckpointCandidate:
    """Returns the checkpoint at `path`, or the newest checkpoint of the run folder at `path`.

    Only one process calls it.

    Verifies COMMIT and state.json. In a run folder, skips damaged checkpoints and reports them. broken: {name: problem}
    of checkpoints that are known to be damaged.

    Raises UserError if there are no checkpoints, or if all are damaged. Only the user can decide to start from scratch.
    """
    checkpoint = _newest_candidate(path, broken)
    try:
        checksums = read_commit(checkpoint).files
        problem = _verify_file(checkpoint / STATE, checksums[FileName(STATE)], False, {}, {})
    except BrokenCheckpointError as error:
        problem = str(error)
    if problem:
        return skip_broken(path, report, broken, checkpoint, problem)
    return CheckpointCandidate(checkpoint, checksums, read_contents(checkpoint), broken)


def _newest_candidate(path: Path, broken: Mapping[str, str]) -> Path:
    if exists(path / COMMIT):
        return path
    folder = path / CHECKPOINTS if is_folder(path / CHECKPOINTS) else path
    candidates = list_committed(folder)
    remaining = [checkpoint for checkpoint in candidates if checkpoint.name not in broken]
    if remaining:
        return remaining[-1]
    if not candidates:
        raise unexpected_path_error(path, "a run with a checkpoint")
    raise UserError(
        f"none of the checkpoints in {folder} ({len(candidates)}) can be used: all are damaged. The oldest one: "
        f"{broken[candidates[0].name]}; repair one, or move the folder away to start from scratch"
    )


def skip_broken(
    path: Path, report: Report, broken: Mapping[str, str], checkpoint: Path, problem: str
) -> CheckpointCandidate:
    """Reports `checkpoint` as damaged, and returns the newest other checkpoint of the run folder at `path`.

    A checkpoint that has been removed meanwhile is skipped without a report. Raises UserError if `path` is the checkpoint
    itself, or if no other checkpoint is left.
    """
    is_gone = not exists(checkpoint)
    if checkpoint == path:
        raise (
            checkpoint_removed_error(path)
            if is_gone
            else UserError(f"checkpoint {path} is broken: {problem}; use another checkpoint")
        )
    if is_gone:  # the run has removed it meanwhile, and has newer checkpoints
        return find_newest_checkpoint(path, report, broken)
    report(f"warning: checkpoint {checkpoint} is broken and is skipped: {problem}")
    return find_newest_checkpoint(path, report, {**broken, checkpoint.name: problem})


def find_checkpoint(
    path: str | Path,
    world: World,
    report: Report = print,
    only_model: bool = False,
    shards: Sequence[Shard] = (),
    found: CheckpointCandidate | None = None,
) -> VerifiedCheckpoint:
    """Finds and verifies a checkpoint: the one at `path`, or the newest undamaged one of the run folder at `path`.

    All ranks call it, and get the same checkpoint. only_model, shards: see `verify_files`. found: the result of an earlier
    `find_newest_checkpoint`, on rank 0.

    Raises UserError on all ranks if every checkpoint is damaged or none exists.
    """
    path = Path(path)
    if not found:
        found = world.on_rank0(find_newest_checkpoint, path, report)
    while True:
        filled: FilledRanges = {}
        problems = verify_files(found.path, found.checksums, world, only_model, shards, filled)
        if not problems:
            return VerifiedCheckpoint(found.path, found.contents, list(found.broken), filled)
        found = world.on_rank0(
            skip_broken, path, report, found.broken, found.path, "; ".join(problems)
        )


def load(checkpoint: VerifiedCheckpoint, shards: Sequence[Shard], world: World) -> None:
    """Loads a checkpoint into `shards`. Sharding strategy and world size can differ from those that saved it.

    Elements that were loaded during verification are not read again. The checkpoint must contain exactly the model's
    tensors among `shards`, and exactly the optimizer's tensors if there are any among `shards`. Raises UserError on all
    ranks if the tensors differ, or if a file can't be read.
    """
    _check_tensors(checkpoint, shards)
    reader = Reader(checkpoint.path, checkpoint.contents)

    def fill() -> None:
        for shard in shards:
            name = stored_name(shard.name)
            end = shard.start + len(shard.data)
            for start, stop in find_gaps(shard.start, end, checkpoint.filled.get(name, ())):
                target = shard.data[start - shard.start : stop - shard.start]
                target.copy_(reader.read(name, start, stop))

    world.on_all_ranks(fill)


def _check_tensors(checkpoint: VerifiedCheckpoint, shards: Sequence[Shard]) -> None:
    """Raises UserError, the same on each rank, if the checkpoint's tensors differ from the shards in name or shape."""
    wanted = {stored_name(shard.name): shard.shape for shard in shards}
    kinds = {name.split("/")[0] for name in wanted}
    stored = {
        name: tensor.shape
        for name, tensor in checkpoint.contents.tensors.items()
        if name.split("/")[0] in kinds
    }
    check_same_tensors(checkpoint.path, wanted, stored)
