"""Defines the interface through which weights in any format are read, and implements it for checkpoints."""

import math
from abc import ABC, abstractmethod
from pathlib import Path

import torch

from mamba_fsdp.checkpoint.folder import Reader, is_model, stored_name
from mamba_fsdp.checkpoint.restore import VerifiedCheckpoint
from mamba_fsdp.conventions import SAFETENSORS_DTYPES
from mamba_fsdp.errors import UserError

WEIGHT_DTYPES = SAFETENSORS_DTYPES.values()


class TensorSource(ABC):
    """Reads the tensors of one source by name. Each tensor is read when it is requested.

    There is one subclass for each format. Its `__init__` opens a source and sets the attributes below.
    """

    source: Path  # the file or folder, for error messages
    shapes: dict[str, tuple[int, ...]]

    @abstractmethod
    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Returns elements [start, stop) of a flattened tensor, as a 1-D tensor on the CPU with the stored dtype."""

    def flatten(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a stored tensor as a 1-D tensor. Raises UserError if it is not a dense floating-point tensor."""
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in WEIGHT_DTYPES:
            raise UserError(
                f"{self.source}: {name} is {tensor.dtype}, {tensor.layout}, on {tensor.device}; weights must be "
                "dense floating-point tensors in memory"
            )
        return tensor.reshape(-1)

    def get(self, name: str) -> torch.Tensor:
        """Returns a whole tensor on the CPU, in its shape."""
        shape = self.shapes[name]
        return self.slice(name, 0, math.prod(shape)).view(shape)


class CheckpointTensors(TensorSource):
    """Reads the tensors of the model from a checkpoint."""

    def __init__(self, checkpoint: VerifiedCheckpoint) -> None:
        self.source = checkpoint.path
        self.reader = Reader(checkpoint.path, checkpoint.contents)
        self.shapes = {}
        for stored, tensor in self.reader.contents.tensors.items():
            if is_model(stored):
                self.shapes[stored.removeprefix("model/")] = tuple(tensor.shape)

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.reader.read(stored_name(name), start, stop)
