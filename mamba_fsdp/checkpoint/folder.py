"""One checkpoint as a folder: what is in it, and reading parts of its tensors.

    step_00001000/
      rank_00000.safetensors ...   what each rank wrote (files.py)
      state.json                   the loop's state; each tensor's shape, dtype and layout; the layouts (ranges.py)
      COMMIT                       size and checksum of every other file, and of the part of it that holds the model;
                                   written last: without it nothing counts

Model tensors are named model/<parameter>, the optimiser's optimizer/<parameter>/exp_avg and .../exp_avg_sq. A layout
says in which elements each piece of a tensor starts and in which file it lies; tensors that are cut alike share it. In
version 1 each tensor has its own, as "pieces", and COMMIT knows whole files only. Checksums are crc32 before version 3.
Every version says what it is in COMMIT and in state.json.
"""

import math
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mamba_fsdp.checkpoint.files import BAD_CONTENT, HASHES, read_exactly, read_header
from mamba_fsdp.checkpoint.ranges import Layout, is_cut, overlaps
from mamba_fsdp.conventions import SAFETENSORS_DTYPES
from mamba_fsdp.errors import UserError
from mamba_fsdp.run_layout import COMMIT, STATE, step_of
from mamba_fsdp.storage import CHECKPOINT, like, parse_object, retry_io

# What the loop's state holds at least, of a run of ours.
LOOP_STATE = {
    "progress": {"step": 0, "tokens": 0, "skipped_steps": 0, "data": {}},
    "world_size": 1,
    "torch": "",
    "settings": {"model": {}, "data": {"dataset_path": "", "seq_length": 1}},
}


class BrokenError(UserError):
    """A checkpoint is not what was written."""


def stored_name(name: str) -> str:
    """The name in a checkpoint of a shard: parameters go under model/."""
    return name if name.startswith("optimizer/") else f"model/{name}"


def is_model(stored: str) -> bool:
    """Whether a tensor of this stored name is the model's, not the optimiser's."""
    return stored.startswith("model/")


def read_commit(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """{file: its size and checksums} as COMMIT has it.

    Raises BrokenError if that is not what was written, or is another step's; UserError if another version of this
    program wrote it: then it is not broken, and an older one is no substitute.
    """
    path = checkpoint / COMMIT
    try:
        content = parse_object(retry_io(path.read_bytes, path))
        if not CHECKPOINT.reads(content):
            _check_damaged(checkpoint, content)
        files = content["files"]
        like(list(files), [...])
        if STATE not in files:
            raise ValueError
        for entry in files.values():
            for part in (entry, entry.get("model", entry)):
                like(part, {"bytes": 0})
                if not part.keys() & HASHES.keys():
                    raise ValueError
        _check_step(checkpoint, COMMIT, content)
    except OSError as error:
        raise BrokenError(f"{COMMIT}: {error.strerror}") from None
    except BAD_CONTENT:
        raise BrokenError(f"{COMMIT} is no list of files") from None
    return files


def _check_damaged(checkpoint, commit):
    """Raises BrokenError for a COMMIT that this program can't read where it can read state.json, UserError where it can
    read neither: COMMIT has no checksum of its own, and a flipped bit there is no other version."""
    state = parse_object(retry_io((checkpoint / STATE).read_bytes, checkpoint / STATE))
    if CHECKPOINT.reads(state):
        raise BrokenError(f"{COMMIT} is damaged: its format or version is not that of {STATE}")
    CHECKPOINT.check(checkpoint / COMMIT, commit)


def _check_step(checkpoint, name, content):
    """Raises BrokenError for a file of another step than the folder's name says; folders may have names of their own."""
    step = step_of(checkpoint.name)
    if step is not None and content["step"] != step:
        raise BrokenError(f"{name} is of step {content['step']}: the folder has another's name")


@dataclass
class Contents:
    """What state.json says, as the newest version has it."""

    state: dict[str, Any]  # what the loop saved
    files: list[str]
    layouts: list[Layout]
    tensors: dict[str, dict[str, Any]]  # stored name -> {shape, dtype, tied, layout: its number}


def read_state(checkpoint: Path) -> Contents:
    """What state.json of a checkpoint says. Raises BrokenError, and UserError for another version."""
    try:
        content = parse_object(retry_io((checkpoint / STATE).read_bytes, checkpoint / STATE))
        CHECKPOINT.check(checkpoint / STATE, content)
        _check_step(checkpoint, STATE, content)
        if content.get("version", 1) == 1:
            _cut_as_later(content)
        contents = Contents(
            content["state"], content["files"], content["layouts"], content["tensors"]
        )
        _check_contents(contents)
    except OSError as error:
        raise BrokenError(
            f"can't read checkpoint {checkpoint}: {STATE}: {error.strerror}"
        ) from None
    except BrokenError as error:
        raise BrokenError(f"checkpoint {checkpoint} is broken: {error}") from None
    except BAD_CONTENT:
        raise BrokenError(
            f"checkpoint {checkpoint} is broken: {STATE} is not what was written"
        ) from None
    return contents


def _cut_as_later(content):
    """Turns version 1, where each tensor has its pieces as [start, count, file], into layouts."""
    layouts: list[Layout] = []
    for entry in content["tensors"].values():
        pieces = entry.pop("pieces")
        layout = {
            "starts": [piece[0] for piece in pieces],
            "files": [piece[2] for piece in pieces],
        }
        if layout not in layouts:
            layouts.append(layout)
        entry["layout"] = layouts.index(layout)
    content["layouts"] = layouts


def _check_contents(contents):
    """Raises one of BAD_CONTENT, or BrokenError, for what would be used without a look."""
    if contents.state.keys() >= {"progress", "settings"}:
        like(contents.state, LOOP_STATE)
    like(contents.state, {})
    like(list(contents.files), [...])
    for layout in contents.layouts:
        if len(layout["starts"]) != len(layout["files"]):
            raise ValueError
        for number in layout["files"]:
            contents.files[number]
    seen = set()
    for name, entry in contents.tensors.items():
        like(entry, {"shape": [0], "tied": [""], "layout": 0})
        SAFETENSORS_DTYPES[entry["dtype"]]
        cut = entry["layout"], math.prod(entry["shape"])
        if cut not in seen and not is_cut(contents.layouts[cut[0]]["starts"], cut[1]):
            raise BrokenError(f"the pieces of {name} are not the whole of it")
        seen.add(cut)


class Reader:
    """Reads parts of the tensors of a checkpoint, whose layout says where they lie.

    A checkpoint may have more files than a process may open: at most a quarter of these stay open, and what lies where
    in a file is noted when it is first opened.
    """

    def __init__(self, checkpoint: str | Path, contents: Contents | None = None):
        """contents: what read_state gives, where it has been read already. Raises UserError where it can't be read."""
        self.path = Path(checkpoint)
        self.contents = contents or read_state(self.path)
        self.state = self.contents.state
        self.numbers = {name: number for number, name in enumerate(self.contents.tensors)}
        self.places: dict[str, np.ndarray] = {}  # of a file: see _read_places
        most_open = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._open = lru_cache(most_open)(FileIO)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a flattened tensor, as a 1-D CPU tensor. Raises UserError with the file that can't
        be read or is not as it was written."""
        entry = self.contents.tensors[name]
        result = torch.empty(stop - start, dtype=SAFETENSORS_DTYPES[entry["dtype"]])
        layout = self.contents.layouts[entry["layout"]]
        for part in overlaps(start, stop, layout["starts"], math.prod(entry["shape"])):
            file = self.contents.files[layout["files"][part.piece]]
            piece_start = layout["starts"][part.piece]
            target = result[part.at : part.at + part.count]
            fill = partial(self._fill, file, name, piece_start, part.offset, target)
            try:
                retry_io(fill, self.path / file)
            except OSError as error:
                raise UserError(f"can't read {self.path / file}: {error.strerror}") from None
            except BAD_CONTENT:
                raise BrokenError(
                    f"{self.path / file} is broken: it is cut short, or its header is not what was written"
                ) from None
        return result

    def _fill(self, file, name, start, offset, target):
        """Fills `target` with the elements from `offset` on of the piece of a tensor that begins at `start`."""
        try:
            opened = self._open(self.path / file)
            if file not in self.places:
                self.places[file] = self._read_places(opened)
            there, count, position = self.places[file][self.numbers[name]].tolist()
            if there != start or offset + len(target) > count:
                raise BrokenError(
                    f"{self.path / file} is broken: it lacks the piece of {name} that starts at {start}"
                )
            opened.seek(position + offset * target.element_size())
            read_exactly(opened, target.view(torch.uint8).numpy())
        except OSError:
            self._open.cache_clear()  # the next attempt opens it anew
            raise

    def _read_places(self, opened):
        """(tensors, 3): start, count and position of each tensor's piece in a file, 0 for none. That is far less than
        the header, of which there may be thousands."""
        opened.seek(0)
        places = np.zeros((len(self.numbers), 3), dtype=np.int64)
        for piece in read_header(opened):
            places[self.numbers[piece.name]] = piece.start, piece.count, piece.position
        return places


def check_same_tensors(
    source: Any, wanted: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]
) -> None:
    """Raises UserError, with names, unless `found` has just the tensors of `wanted` (both name -> shape)."""
    wrong = [f"it lacks {name}" for name in sorted(wanted.keys() - found.keys())]
    wrong += [f"the model has no {name}" for name in sorted(found.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & found.keys()):
        if tuple(found[name]) != tuple(wanted[name]):
            wrong.append(f"{name} is {tuple(found[name])}, not {tuple(wanted[name])}")
    if len(wrong) > 5:
        wrong[5:] = [f"and {len(wrong) - 5} more"]
    if wrong:
        raise UserError(f"{source} does not fit the model: {'; '.join(wrong)}")
