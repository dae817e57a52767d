"""Gives tensors by name, wherever they are stored, and the tensors of a checkpoint."""

import math
from abc import ABC, abstractmethod
from pathlib import Path

import torch

from mamba_fsdp.checkpoint.folder import Reader, is_model, stored_name
from mamba_fsdp.checkpoint.restore import WholeCheckpoint
from mamba_fsdp.conventions import SAFETENSORS_DTYPES
from mamba_fsdp.errors import UserError

WEIGHTS = SAFETENSORS_DTYPES.values()


class Tensors(ABC):
    """The tensors of one source by name, each read when it is asked for.

    Each format is a subclass with two methods: `__init__` opens a source and sets the attributes, `slice` reads.
    """

    source: Path  # the file or folder, for messages
    shapes: dict[str, tuple[int, ...]]

    @abstractmethod
    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Returns elements [start, stop) of a flattened tensor, 1-D on the CPU, in the type they are stored in."""

    def flat(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the elements of a stored tensor in one row. Raises UserError if they are not weights."""
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in WEIGHTS:
            raise UserError(
                f"{self.source}: {name} is {tensor.dtype}, {tensor.layout}, on {tensor.device}; weights are dense "
                "floating-point numbers in memory"
            )
        return tensor.reshape(-1)

    def get(self, name: str) -> torch.Tensor:
        """Returns one whole tensor on the CPU."""
        shape = self.shapes[name]
        return self.slice(name, 0, math.prod(shape)).view(shape)


class CheckpointTensors(Tensors):
    """The model's tensors in a checkpoint."""

    def __init__(self, whole: WholeCheckpoint) -> None:
        self.source = whole.path
        self.reader = Reader(whole.path, whole.contents)
        self.shapes = {}
        for stored, tensor in self.reader.contents.tensors.items():
            if is_model(stored):
                self.shapes[stored.removeprefix("model/")] = tuple(tensor.shape)

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.reader.read(stored_name(name), start, stop)
