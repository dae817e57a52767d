"""One checkpoint as a folder: what is in it, and reading parts of its tensors.

    step_00001000/
      rank_00000.safetensors ...   what each rank wrote (files.py)
      state.json                   the loop's state; each tensor's shape, dtype and layout; the layouts (ranges.py)
      COMMIT                       size and checksum of every other file, and of the part of it that holds the model;
                                   written last: without it nothing counts

Model tensors are named model/<parameter>, the optimiser's optimizer/<parameter>/exp_avg and .../exp_avg_sq, Muon's
optimizer/<parameter>/momentum_buffer. A layout says in which elements each piece of a tensor starts and in which file
it lies; tensors that are cut alike share it. COMMIT and state.json say the version of the format.
"""

import math
import resource
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mamba_fsdp.checkpoint.contents import BAD_CONTENT, BrokenError, Contents
from mamba_fsdp.checkpoint.files import read_exactly, read_header
from mamba_fsdp.checkpoint.ranges import overlaps
from mamba_fsdp.conventions import SAFETENSORS_DTYPES
from mamba_fsdp.errors import UserError
from mamba_fsdp.run_layout import removed
from mamba_fsdp.storage import exists, retry_io


def stored_name(name: str) -> str:
    """The name in a checkpoint of a shard: parameters go under model/."""
    return name if name.startswith("optimizer/") else f"model/{name}"


def is_model(stored: str) -> bool:
    """Whether a tensor of this stored name is the model's, not the optimiser's."""
    return stored.startswith("model/")


class Reader:
    """Reads parts of the tensors of a checkpoint, whose layout says where they lie.

    A checkpoint may have more files than a process may open: at most a quarter of these stay open, and what lies where
    in a file is noted when it is first opened.
    """

    def __init__(self, checkpoint: Path, contents: Contents):
        """contents: what read_state gives of it."""
        self.path = checkpoint
        self.contents = contents
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
                if not exists(self.path):
                    raise removed(self.path) from None
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
