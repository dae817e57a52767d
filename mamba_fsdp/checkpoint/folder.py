"""One checkpoint as a folder: what is in it, whether it is whole, which is the newest, and reading it into shards.

    step_00001000/
      rank_00000.safetensors ...   what each rank wrote (files.py)
      state.json                   the loop's state; each tensor's shape, dtype and layout; the layouts (ranges.py)
      COMMIT                       size and checksum of every other file, and of the part of it that holds the model;
                                   written last: without it nothing counts

Model tensors are named model/<parameter>, the optimiser's optimizer/<parameter>/exp_avg and .../exp_avg_sq. A layout
says in which elements each piece of a tensor starts and in which file it lies; tensors that are cut alike share it. In
version 1 each tensor has its own, as "pieces", and COMMIT knows whole files only. Checksums are crc32 before version 3.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mamba_fsdp.checkpoint.files import HASHES, PieceReader, checksum
from mamba_fsdp.checkpoint.ranges import is_cut, overlaps
from mamba_fsdp.checkpoint.retention import held, until_the_end
from mamba_fsdp.conventions import SAFETENSORS_DTYPES
from mamba_fsdp.errors import UserError
from mamba_fsdp.formats import CHECKPOINT
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run_layout import CHECKPOINTS, COMMIT, STATE, committed, no_checkpoint
from mamba_fsdp.storage import exists, retry_io
from mamba_fsdp.untrusted import like, parse_object

SAVED = {
    "progress": {"step": 0, "tokens": 0, "skipped_steps": 0, "data": {}},
    "world_size": 1,
    "torch": "",
    "settings": {"model": {}, "data": {"dataset_path": "", "seq_length": 1}},
}


def stored_name(name: str) -> str:
    """The name in a checkpoint of a shard: parameters go under model/."""
    return name if name.startswith("optimizer/") else f"model/{name}"


def is_model(stored: str) -> bool:
    """Whether a tensor of this stored name is the model's, not the optimiser's."""
    return stored.startswith("model/")


def problems(
    checkpoint: Path, world: World, part: str = "all", shards: Sequence[Shard] = ()
) -> list[str]:
    """What is wrong with a committed checkpoint: a list of sentences, empty when every file has its size and checksum.

    part: "all", or only "model", its weights, or "state", state.json; "sizes": without reading. Called by all ranks,
    which share the reading; all get the same answer. Raises UserError on all of them for one that another version of
    this program wrote: that one is not broken, and an older one is no substitute. shards: filled with what this rank
    reads of them, whatever the verdict: its own file, where as many ranks have written, else neighbouring ones.
    """
    files, found = world.on_rank0(lambda: _committed_files(checkpoint))
    names = sorted(name for name in files if part != "state" or name == STATE)
    mine = names[
        len(names) * world.rank // world.size : len(names) * (world.rank + 1) // world.size
    ]
    wanted = to_be_filled(shards)
    found += world.on_all_ranks(
        lambda: [
            problem
            for name in mine
            if (
                problem := problem_of(
                    checkpoint / name, files[name], part, wanted if name != STATE else None
                )
            )
        ]
    )
    return sorted(world.gather_unique(found))


def to_be_filled(shards: Iterable[Shard]) -> dict[str, Shard]:
    """By their stored names, for `checksum`; what verifying another checkpoint has filled of them no longer counts."""
    for shard in shards:
        shard.filled.clear()
    return {stored_name(shard.name): shard for shard in shards}


def problem_of(
    path: Path, entry: dict[str, Any], part: str = "all", wanted: dict[str, Shard] | None = None
) -> str:
    """What is wrong with a file, or that part of it, of which COMMIT says so; "" for nothing. wanted: of checksum."""
    expected = entry.get("model", entry) if part == "model" else entry
    try:
        size = retry_io(path.stat, path).st_size
        if size != entry["bytes"]:
            return f"{path.name} has {size} bytes, not {entry['bytes']}"
        if part == "sizes":
            return ""
        kind = "xxh3" if "xxh3" in expected else "crc32"
        actual = retry_io(lambda: checksum(path, expected["bytes"], kind, wanted), path)
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    return (
        ""
        if actual[kind] == expected[kind]
        else f"the content of {path.name} has changed since it was written"
    )


def _committed_files(checkpoint):
    try:
        content = parse_object(retry_io((checkpoint / COMMIT).read_bytes, checkpoint / COMMIT))
        CHECKPOINT.check(checkpoint / COMMIT, content)
        files = content["files"]
        if STATE in like([*files], [...]) and all(
            like(part, {"bytes": 0}).keys() & HASHES.keys()
            for entry in files.values()
            for part in (entry, entry.get("model", entry))
        ):
            return files, []
    except OSError as error:
        return {}, [f"{COMMIT}: {error.strerror}"]
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return {}, [f"{COMMIT} is no list of files"]


def newest_whole(
    checkpoints: Path,
    world: World,
    report: Callable[[str], Any],
    part: str = "all",
    hold: Callable[[Path], Any] = id,
    shards: Sequence[Shard] = (),
) -> tuple[Path | None, list[str]]:
    """(the newest checkpoint whose `part`, see `problems`, is whole, or None; names of the broken ones passed over).

    hold: called on rank 0 with each before it is read. shards: for `load`. Raises UserError when there are committed
    checkpoints but none is whole: a new start must be the user's decision.
    """
    broken: list[str] = []
    candidates = world.on_rank0(lambda: committed(checkpoints))
    for checkpoint in reversed(candidates):
        world.on_rank0(partial(hold, checkpoint))
        wrong = problems(checkpoint, world, part, shards)
        if not wrong:
            return checkpoint, broken
        if not world.on_rank0(
            partial(exists, checkpoint)
        ):  # its run has pruned it meanwhile, and has newer ones
            return newest_whole(checkpoints, world, report, part, hold, shards)
        broken.append(checkpoint.name)
        if world.rank == 0:
            report(
                f"warning: checkpoint {checkpoint} is broken and passed over: {'; '.join(wrong)}"
            )
    if candidates:
        raise UserError(
            f"none of the {len(candidates)} checkpoints in {checkpoints} is whole, the oldest: "
            f"{'; '.join(wrong)}; repair one, or move the folder away to start from scratch"
        )
    for shard in shards:
        shard.data.zero_()  # one that was passed over, or is gone, may have filled it
    return None, broken


def find_checkpoint(
    path: str | Path,
    world: World,
    report: Callable[[str], Any] = print,
    part: str = "all",
    shards: Sequence[Shard] = (),
) -> Path:
    """The checkpoint that `path` means, the same on all ranks: itself, or the newest whole one of a run folder.

    Its run does not prune it until `until_the_end` is closed, or this process ends. Raises UserError where there
    is none, or where the one that was named is broken: `part` of it, see `problems`. shards: for `load`.
    """

    def hold(checkpoint):
        until_the_end.enter_context(held(checkpoint))

    path = Path(path)
    if world.on_rank0(lambda: exists(path / COMMIT)):
        world.on_rank0(lambda: hold(path))
        if wrong := problems(path, world, part, shards):
            raise UserError(f"checkpoint {path} is broken: {'; '.join(wrong)}")
        return path
    found, _ = newest_whole(
        path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path,
        world,
        report,
        part,
        hold,
        shards,
    )
    if found is None:
        raise no_checkpoint(path)
    return found


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The content of a checkpoint's state.json, as the newest version has it. Raises UserError."""
    try:
        content = parse_object(retry_io((checkpoint / STATE).read_bytes, checkpoint / STATE))
        CHECKPOINT.check(checkpoint / STATE, content)
        content.setdefault("layouts", [])
        for name in _badly_cut(content["tensors"], content["layouts"]):
            raise UserError(
                f"checkpoint {checkpoint} is broken: the pieces of {name} are not the whole of it"
            )
        _refuse_odd(**content)
        return {field: content[field] for field in ("state", "files", "layouts", "tensors")}
    except OSError as error:
        raise UserError(f"can't read checkpoint {checkpoint}: {STATE}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise UserError(
            f"checkpoint {checkpoint} is broken: {STATE} is not what was written"
        ) from None


def _refuse_odd(state, files, layouts, tensors, **_):
    """Raises ValueError, KeyError, TypeError, IndexError for what would be used without a look."""
    like(state, SAVED if {"progress", "settings"} & state.keys() else {}), like([*files], [...])
    for layout in layouts:
        [files[number] for number, _ in zip(layout["files"], layout["starts"], strict=True)]
    for entry in tensors.values():
        like(entry, {"shape": [0], "tied": [""], "layout": 0}), SAFETENSORS_DTYPES[entry["dtype"]]


def _badly_cut(tensors, layouts):
    """Names of tensors whose pieces are not the whole of it, one for each layout. Those of version 1 get a layout."""
    for entry in tensors.values():
        if pieces := entry.pop("pieces", None):
            layout = {
                "starts": [piece[0] for piece in pieces],
                "files": [piece[2] for piece in pieces],
            }
            layouts += [] if layout in layouts else [layout]
            entry["layout"] = layouts.index(layout)
    cut = {(entry["layout"], math.prod(entry["shape"])): name for name, entry in tensors.items()}
    return [
        name for (number, size), name in cut.items() if not is_cut(layouts[number]["starts"], size)
    ]


class Reader:
    """An open checkpoint. `tensors`: stored name -> {shape, dtype, tied, layout}; `state`: what the loop saved.

    content: what read_state gives, where it has been read already. Raises UserError where it can't be read.
    """

    def __init__(self, checkpoint: str | Path, content: dict[str, Any] | None = None):
        self.path = Path(checkpoint)
        self.content = content or read_state(self.path)
        self.state, self.tensors, self.layouts = (
            self.content[field] for field in ("state", "tensors", "layouts")
        )
        self.files = self.content["files"]
        self._pieces = PieceReader(self.path, self.tensors)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a flattened tensor, as a 1-D CPU tensor."""
        result = torch.empty(stop - start, dtype=SAFETENSORS_DTYPES[self.tensors[name]["dtype"]])
        for file, piece, offset, at, count in self.where(name, start, stop):
            self._pieces.read(file, name, piece, offset, result[at : at + count])
        return result

    def where(self, name: str, start: int, stop: int) -> Iterator[tuple[str, int, int, int, int]]:
        """(file, start of its piece, offset in that, offset from `start`, count) for each piece of [start, stop)."""
        entry = self.tensors[name]
        layout = self.layouts[entry["layout"]]
        for number, *place in overlaps(start, stop, layout["starts"], math.prod(entry["shape"])):
            yield self.files[layout["files"][number]], layout["starts"][number], *place


def load(
    checkpoint: Path,
    shards: Sequence[Shard],
    world: World,
    check: Callable[[dict, Path], None] = lambda state, checkpoint: None,
) -> dict:
    """Fill `shards`, of any strategy and world size, from a checkpoint. Returns the state that was saved with them.

    The checkpoint must hold just these tensors of the model, and of the optimiser if its shards are among them.
    check(state, checkpoint), if given, may refuse first, on rank 0. Raises UserError on all ranks when any can't load.
    Where the checkpoint was verified with the same `shards`, only what that has not filled is read.
    """

    def open_checked():
        reader = Reader(checkpoint)
        check(reader.state, checkpoint)
        wanted = {stored_name(shard.name): shard.shape for shard in shards}
        kinds = {name.split("/")[0] for name in wanted}
        check_same_tensors(
            checkpoint,
            wanted,
            {
                name: entry["shape"]
                for name, entry in reader.tensors.items()
                if name.split("/")[0] in kinds
            },
        )
        return reader.content

    def fill(shard, name):
        for file, *piece, at, count in reader.where(
            name, shard.start, shard.start + len(shard.data)
        ):
            if (checkpoint / file, *piece, count) not in shard.filled:
                shard.data[at : at + count].copy_(
                    reader.read(name, shard.start + at, shard.start + at + count)
                )
        shard.filled.clear()  # from here on it may change

    reader = Reader(checkpoint, world.on_rank0(open_checked))
    world.on_all_ranks(lambda: [fill(shard, stored_name(shard.name)) for shard in shards])
    return reader.state


def check_same_tensors(
    source: Any, wanted: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]
) -> None:
    """Raises UserError, with names, unless `found` has just the tensors of `wanted` (both name -> shape)."""

    def some(names):
        return ", ".join(sorted(names)[:5]) + (
            f" and {len(names) - 5} more" if len(names) > 5 else ""
        )

    wrong = []
    if missing := wanted.keys() - found.keys():
        wrong.append(f"it lacks {some(missing)}")
    if extra := found.keys() - wanted.keys():
        wrong.append(f"the model has no {some(extra)}")
    wrong += [
        f"{name} is {tuple(found[name])}, not {tuple(wanted[name])}"
        for name in sorted(wanted.keys() & found.keys())
        if tuple(found[name]) != tuple(wanted[name])
    ][:5]
    if wrong:
        raise UserError(f"{source} does not fit the model: {'; '.join(wrong)}")
