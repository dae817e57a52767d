"""One checkpoint as a folder: what is in it, whether it is whole, which is the newest, and reading it into shards.

    step_00001000/
      rank_00000.safetensors ...   what each rank wrote (files.py)
      state.json                   the loop's state; each tensor's shape, dtype and in which files its elements lie
      COMMIT                       size and checksum of every other file; written last: without it nothing counts

Model tensors are named model/<parameter>, the optimiser's optimizer/<parameter>/exp_avg and .../exp_avg_sq.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mamba_fsdp.checkpoint.files import PieceReader, checksum
from mamba_fsdp.checkpoint.ranges import overlaps, tiles
from mamba_fsdp.errors import UserError
from mamba_fsdp.formats import CHECKPOINT
from mamba_fsdp.parallel.shards import Shard, fill_parts
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run_layout import CHECKPOINTS, COMMIT, STATE, committed


def stored_name(name: str) -> str:
    """The name in a checkpoint of a shard: parameters go under model/."""
    return name if name.startswith("optimizer/") else f"model/{name}"


def problems(checkpoint: Path, world: World) -> list[str]:
    """What is wrong with a committed checkpoint: a list of sentences, empty when every file has its size and checksum.

    Called by all ranks, which share the reading; all get the same answer. Raises UserError on all of them for one that
    another version of this program wrote: that one is not broken, and an older one is no substitute.
    """
    files, found = world.on_rank0(lambda: _committed_files(checkpoint))
    mine = sorted(files)[world.rank::world.size]
    found += world.run_local(lambda: [problem for name in mine if (problem := _problem(checkpoint, name, files[name]))])
    return sorted({problem for rank in world.gather_objects(found) for problem in rank})


def _problem(checkpoint, name, expected):
    try:
        actual = checksum(checkpoint / name)
    except OSError as error:
        return f"{name}: {error.strerror}"
    if actual["bytes"] != expected["bytes"]:
        return f"{name} has {actual['bytes']} bytes, not {expected['bytes']}"
    return "" if actual == expected else f"the content of {name} has changed since it was written"


def _committed_files(checkpoint):
    try:
        content = json.loads((checkpoint / COMMIT).read_bytes())
        CHECKPOINT.check(checkpoint / COMMIT, content)
        files = content["files"]
        listed = STATE in files and all(entry.keys() == {"bytes", "crc32"} for entry in files.values())
    except OSError as error:
        return {}, [f"{COMMIT}: {error.strerror}"]
    except (ValueError, KeyError, TypeError, AttributeError):
        listed = False
    return (files, []) if listed else ({}, [f"{COMMIT} is no list of files"])


def newest_whole(checkpoints: Path, world: World, report: Callable[[str], Any]) -> tuple[Path | None, list[str]]:
    """(the newest whole checkpoint or None, names of the broken ones passed over), rank 0's choice on all ranks.

    Raises UserError when there are committed checkpoints but none is whole: a new start must be the user's decision.
    """
    broken: list[str] = []
    candidates = world.broadcast_object(committed(checkpoints) if world.rank == 0 else [])
    for checkpoint in reversed(candidates):
        wrong = problems(checkpoint, world)
        if not wrong:
            return checkpoint, broken
        broken.append(checkpoint.name)
        if world.rank == 0:
            report(f"warning: checkpoint {checkpoint} is broken and passed over: {'; '.join(wrong)}")
    if candidates:
        raise UserError(f"none of the {len(candidates)} checkpoints in {checkpoints} is whole, the oldest: "
                        f"{'; '.join(wrong)}; repair one, or move the folder away to start from scratch")
    return None, broken


def find_checkpoint(path: str | Path, world: World, report: Callable[[str], Any] = print) -> Path:
    """The checkpoint that `path` means, the same on all ranks: itself, or the newest whole one of a run folder.

    Raises UserError where there is none, or where the one that was named is broken.
    """
    path = Path(path)
    if world.broadcast_object((path / COMMIT).is_file()):
        if wrong := problems(path, world):
            raise UserError(f"checkpoint {path} is broken: {'; '.join(wrong)}")
        return path
    found, _ = newest_whole(path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path, world, report)
    if found is None:
        raise UserError(f"{path} is neither a committed checkpoint nor a run folder with one "
                        f"({CHECKPOINTS}/step_*/{COMMIT})")
    return found


class Reader:
    """An open checkpoint. `tensors`: stored name -> {shape, dtype, tied, pieces}; `state`: what the loop saved.

    Raises UserError where it can't be read.
    """

    def __init__(self, checkpoint: str | Path):
        self.path = Path(checkpoint)
        try:
            content = json.loads((self.path / STATE).read_bytes())
            CHECKPOINT.check(self.path / STATE, content)
            self.state, self.tensors, self.files = content["state"], content["tensors"], content["files"]
        except OSError as error:
            raise UserError(f"can't read checkpoint {self.path}: {STATE}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"checkpoint {self.path} is broken: {STATE} is not what was written") from None
        self._open = functools.cache(PieceReader)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a flattened tensor, as a 1-D CPU tensor."""
        entry = self.tensors[name]
        if not tiles(entry["pieces"], math.prod(entry["shape"])):
            raise UserError(f"checkpoint {self.path} is broken: the pieces of {name} are not the whole of it")
        parts = [self._open(self.path / self.files[piece[2]]).read(name, piece[0], offset, count)
                 for piece, offset, _, count in overlaps(start, stop, entry["pieces"])]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def load(checkpoint: Path, shards: Sequence[Shard], world: World,
         check: Callable[[dict, Path], None] = lambda state, checkpoint: None) -> dict:
    """Fill `shards`, of any strategy and world size, from a checkpoint. Returns the state that was saved with them.

    The checkpoint must hold just these tensors of the model, and of the optimiser if its shards are among them.
    check(state, checkpoint), if given, may refuse first. Raises UserError on all ranks when any rank can't load.
    """
    state, failure = world.run_local(lambda: _load(checkpoint, shards, check))
    failures = [text for text in world.gather_objects(failure) if text]
    if failures:
        raise UserError("; ".join(dict.fromkeys(failures)))
    return state


def _load(checkpoint, shards, check):
    """(the state, None), or (None, why this rank can't load)."""
    try:
        reader = Reader(checkpoint)
        check(reader.state, checkpoint)
        wanted = {stored_name(shard.name): shard.shape for shard in shards}
        kinds = {name.split("/")[0] for name in wanted}
        refuse_other_tensors(checkpoint, wanted, {name: entry["shape"] for name, entry in reader.tensors.items()
                                                  if name.split("/")[0] in kinds})
        fill_parts(shards, lambda name, shape, start, stop: reader.read(stored_name(name), start, stop))
        return reader.state, None
    except UserError as error:
        return None, str(error)


def refuse_other_tensors(source: Any, wanted: Mapping[str, Sequence[int]],
                         found: Mapping[str, Sequence[int]]) -> None:
    """Raises UserError, with names, unless `found` has just the tensors of `wanted` (both name -> shape)."""
    def some(names):
        return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

    wrong = []
    if missing := wanted.keys() - found.keys():
        wrong.append(f"it lacks {some(missing)}")
    if extra := found.keys() - wanted.keys():
        wrong.append(f"the model has no {some(extra)}")
    wrong += [f"{name} is {tuple(found[name])}, not {tuple(wanted[name])}"
              for name in sorted(wanted.keys() & found.keys()) if tuple(found[name]) != tuple(wanted[name])][:5]
    if wrong:
        raise UserError(f"{source} does not fit the model: {'; '.join(wrong)}")
