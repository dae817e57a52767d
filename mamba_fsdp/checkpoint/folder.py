"""Defines a checkpoint's folder: what lies in it, and how to read parts of its tensors.

    step_00001000/
      rank_00000.safetensors ...   what each rank wrote (files.py)
      state.json                   the run's progress; each tensor's shape and dtype, and how it is cut (ranges.py)
      COMMIT                       size and checksum of every other file, and of the part of it that holds the model;
                                   written last: without it nothing counts

Model tensors are named model/<parameter>, the optimiser's optimizer/<parameter>/exp_avg and .../exp_avg_sq, Muon's
optimizer/<parameter>/momentum_buffer. COMMIT and state.json say the version of the format.
"""

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
from mamba_fsdp.run.layout import removed
from mamba_fsdp.storage.patience import exists, retry_io


def stored_name(name: str) -> str:
    """Returns the name that a shard has in a checkpoint: parameters go under model/."""
    return name if name.startswith("optimizer/") else f"model/{name}"


def is_model(stored: str) -> bool:
    """Returns whether a tensor of this stored name belongs to the model, not to the optimiser."""
    return stored.startswith("model/")


class Reader:
    """Reads parts of the tensors of a checkpoint.

    A checkpoint may have more files than a process may open, so at most a quarter of that number stay open. The
    positions of a file's pieces are read when it is first opened.
    """

    def __init__(self, checkpoint: Path, contents: Contents):
        """Opens no file yet. contents: what read_contents returns for the checkpoint."""
        self.path = checkpoint
        self.contents = contents
        self.numbers = {name: number for number, name in enumerate(self.contents.tensors)}
        self.places: dict[str, np.ndarray] = {}  # by file, see _read_places
        most_open = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._open = lru_cache(most_open)(FileIO)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Returns elements [start, stop) of a flattened tensor, as a 1-D CPU tensor. Raises UserError that names the
        file that can't be read or is not as it was written."""
        tensor = self.contents.tensors[name]
        result = torch.empty(stop - start, dtype=SAFETENSORS_DTYPES[tensor.dtype])
        ranges = self.contents.ranges[tensor.ranges]
        for part in overlaps(start, stop, ranges.starts, tensor.element_count()):
            file = self.contents.files[ranges.files[part.piece]]
            piece_start = ranges.starts[part.piece]
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

    def _fill(self, file: str, name: str, start: int, offset: int, target: torch.Tensor) -> None:
        """Fills `target` from the piece of tensor `name` that begins at element `start`, skipping the piece's first
        `offset` elements."""
        try:
            opened = self._open(self.path / file)
            if file not in self.places:
                self.places[file] = self._read_places(opened)
            piece_start, count, position = self.places[file][self.numbers[name]].tolist()
            if piece_start != start or offset + len(target) > count:
                raise BrokenError(
                    f"{self.path / file} is broken: it lacks the piece of {name} that starts at {start}"
                )
            opened.seek(position + offset * target.element_size())
            read_exactly(opened, target.view(torch.uint8).numpy())
        except OSError:
            self._open.cache_clear()  # so that a retry opens it again
            raise

    def _read_places(self, opened: FileIO) -> np.ndarray:
        """Returns (tensors, 3): start, count and position of each tensor's piece in a file, zeros if the file has none.
        There may be thousands of files, and this takes far less memory than their headers."""
        opened.seek(0)
        places = np.zeros((len(self.numbers), 3), dtype=np.int64)
        for piece in read_header(opened):
            places[self.numbers[piece.name]] = piece.start, piece.count, piece.position
        return places


def check_same_tensors(
    source: Any, wanted: Mapping[str, Sequence[int]], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Raises UserError, with names, unless `shapes` has exactly the tensors of `wanted` (both name -> shape)."""
    wrong = [f"it lacks {name}" for name in sorted(wanted.keys() - shapes.keys())]
    wrong += [f"the model has no {name}" for name in sorted(shapes.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & shapes.keys()):
        if tuple(shapes[name]) != tuple(wanted[name]):
            wrong.append(f"{name} is {tuple(shapes[name])}, not {tuple(wanted[name])}")
    if len(wrong) > 5:
        wrong[5:] = [f"and {len(wrong) - 5} more"]
    if wrong:
        raise UserError(f"{source} does not fit the model: {'; '.join(wrong)}")
