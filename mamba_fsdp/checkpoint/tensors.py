"""Tensors by name, wherever they are stored, and those of a checkpoint."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mamba_fsdp.checkpoint.contents import read_state
from mamba_fsdp.checkpoint.folder import Reader, is_model, stored_name
from mamba_fsdp.parallel.world import World


@dataclass
class Tensors:
    """Tensors by name, read when asked for. slice(name, start, stop): elements [start, stop) of a flattened tensor."""

    source: Path  # the file or folder, for messages
    shapes: dict[str, tuple[int, ...]]
    slice: Callable[[str, int, int], torch.Tensor]  # 1-D on the CPU

    def get(self, name: str) -> torch.Tensor:
        """One whole tensor on the CPU."""
        return self.slice(name, 0, math.prod(self.shapes[name])).view(self.shapes[name])


def open_checkpoint(path: Path, world: World) -> Tensors:
    """The model's Tensors in a checkpoint. Called by all ranks. Raises UserError, of any rank on all."""
    reader = Reader(path, world.on_rank0(read_state, path))
    shapes = {}
    for stored, entry in reader.contents.tensors.items():
        if is_model(stored):
            shapes[stored.removeprefix("model/")] = tuple(entry["shape"])

    def read(name, start, stop):
        return reader.read(stored_name(name), start, stop)

    return Tensors(path, shapes, read)
