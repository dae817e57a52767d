"""Defines the layout of a checkpoint's folder, and reads parts of its tensors.

    step_00001000/
      rank_00000.safetensors ...   the pieces of tensors that each rank wrote (files.py)
      state.json                   the run's progress, and the shape, dtype and pieces (ranges.py) of each tensor
      COMMIT                       size and checksum of every other file, and of the part of a rank's file that contains
                                   the model. COMMIT is written last: a folder without it is not a checkpoint.

The tensors of the model are named model/<parameter>, the moments of AdamW optimizer/<parameter>/exp_avg and
optimizer/<parameter>/exp_avg_sq, and the momentum of Muon optimizer/<parameter>/momentum_buffer. COMMIT and state.json
contain the version of the format.
"""

import resource
from collections.abc import Mapping, Sequence
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mamba_fsdp.checkpoint.contents import CORRUPTION_ERRORS, BrokenCheckpointError, Contents
from mamba_fsdp.checkpoint.files import read_exactly, read_header
from mamba_fsdp.checkpoint.ranges import find_overlaps
from mamba_fsdp.conventions import SAFETENSORS_DTYPES
from mamba_fsdp.errors import UserError
from mamba_fsdp.run.layout import checkpoint_removed_error
from mamba_fsdp.storage.retry import exists, retry_io


def stored_name(name: str) -> str:
    """Returns the name of a shard in a checkpoint. Parameters of the model get the prefix model/."""
    return name if name.startswith("optimizer/") else f"model/{name}"


def is_model(stored: str) -> bool:
    """Returns whether the tensor of this stored name belongs to the model and not to the optimizer."""
    return stored.startswith("model/")


class Reader:
    """Reads parts of the tensors of a checkpoint.

    A checkpoint can have more files than a process is allowed to open. Therefore at most a quarter of this number stay
    open. The header of a file is read when the file is first opened.
    """

    def __init__(self, checkpoint: Path, contents: Contents):
        """contents: the result of `read_contents` for this checkpoint. Files are opened when they are first read."""
        self.path = checkpoint
        self.contents = contents
        self.numbers = {name: number for number, name in enumerate(self.contents.tensors)}
        self.places: dict[str, np.ndarray] = {}  # {file name: table}, see _read_places
        most_open = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._open = lru_cache(most_open)(FileIO)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Returns elements [start, stop) of a flattened tensor as a 1-D tensor on the CPU.

        Raises UserError if a file can't be read, and BrokenCheckpointError if a file is damaged.
        """
        tensor = self.contents.tensors[name]
        result = torch.empty(stop - start, dtype=SAFETENSORS_DTYPES[tensor.dtype])
        ranges = self.contents.ranges[tensor.ranges]
        for part in find_overlaps(start, stop, ranges.starts, tensor.element_count()):
            file = self.contents.files[ranges.files[part.piece]]
            piece_start = ranges.starts[part.piece]
            target = result[part.at : part.at + part.count]
            try:
                retry_io(self._fill, self.path / file, file, name, piece_start, part.offset, target)
            except OSError as error:
                if not exists(self.path):
                    raise checkpoint_removed_error(self.path) from None
                raise UserError(
                    f"can't read {self.path / file}: {error.strerror}; use another checkpoint"
                ) from None
            except CORRUPTION_ERRORS:
                raise BrokenCheckpointError(
                    f"{self.path / file} is broken: the file is truncated, or its header is damaged; use another checkpoint"
                ) from None
        return result

    def _fill(self, file: str, name: str, start: int, offset: int, target: torch.Tensor) -> None:
        """Reads elements of one piece of the tensor `name` into `target`.

        The piece begins at element `start` of the flattened tensor. Its first `offset` elements are skipped. Raises
        BrokenCheckpointError if the file does not contain the piece.
        """
        try:
            opened = self._open(self.path / file)
            if file not in self.places:
                self.places[file] = self._read_places(opened)
            piece_start, count, position = self.places[file][self.numbers[name]].tolist()
            if piece_start != start or offset + len(target) > count:
                raise BrokenCheckpointError(
                    f"{self.path / file} is broken: the piece of {name} that starts at {start} is missing; use another checkpoint"
                )
            opened.seek(position + offset * target.element_size())
            read_exactly(opened, target.view(torch.uint8).numpy())
        except OSError:
            self._open.cache_clear()  # so that a retry opens the file again
            raise

    def _read_places(self, opened: FileIO) -> np.ndarray:
        """Returns an array of shape (tensors, 3) with start, count and position of each tensor's piece in a file.

        The row of a tensor without a piece in this file is zero. An array needs far less memory than the parsed header,
        and a checkpoint can have thousands of files.
        """
        opened.seek(0)
        places = np.zeros((len(self.numbers), 3), dtype=np.int64)
        for piece in read_header(opened):
            places[self.numbers[piece.name]] = piece.start, piece.count, piece.position
        return places


def check_same_tensors(
    source: Any, wanted: Mapping[str, Sequence[int]], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Raises UserError with the names of missing, unexpected and differently shaped tensors, if there are any.

    source: the source of the tensors, for messages. wanted: {name: shape} of the model's tensors. shapes: {name:
    shape} of the tensors in the source.
    """
    wrong = [f"{name} is missing" for name in sorted(wanted.keys() - shapes.keys())]
    wrong += [f"the model has no {name}" for name in sorted(shapes.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & shapes.keys()):
        if tuple(shapes[name]) != tuple(wanted[name]):
            wrong.append(f"{name} has the shape {tuple(shapes[name])}, not {tuple(wanted[name])}")
    if len(wrong) > 5:
        wrong[5:] = [f"and {len(wrong) - 5} more"]
    if wrong:
        raise UserError(
            f"{source} does not fit the model: {'; '.join(wrong)}. Give the settings of the model that was saved"
        )
