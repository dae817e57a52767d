"""A state dict as torch.save writes it, but one tensor at a time: a zip archive of data/0, data/1, ... and data.pkl.

In the pickle each tensor is what torch.Tensor.__reduce_ex__ makes of it, its storage a persistent id, as in
torch.serialization._save. torch's own writer makes the archive.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mamba_fsdp.heartbeat import heart


class _Written:
    """Stands in the pickle for a tensor whose elements are in the archive."""

    def __init__(self, tensor: torch.Tensor, key: str):
        typed_storage = tensor.new_empty(0)._typed_storage()
        kind = getattr(torch, typed_storage._pickle_storage_type())
        storage = ("storage", kind, key, "cpu", tensor.numel())
        shape = tuple(tensor.shape)
        hooks: OrderedDict = OrderedDict()
        self.arguments = (storage, 0, shape, tensor.stride(), False, hooks)

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v2, self.arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        is_storage = isinstance(obj, tuple) and obj[:1] == ("storage",)
        return obj if is_storage else None


def write_pth(
    path: Path, tensors: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str]
) -> None:
    """Writes (name, CPU tensor) pairs and, for each of `tied`, {other name: name}, a second name. Raises OSError."""
    try:
        with open(path, "xb") as file:
            archive = torch._C.PyTorchFileWriter(file)
            try:
                _write_records(archive, tensors, tied)
            finally:
                archive.write_end_of_file()  # else its destructor would, and end the process where it can't
    except RuntimeError as error:  # torch covers what the disk says
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _write_records(archive, tensors, tied):
    content = {}
    for number, (name, tensor) in enumerate(tensors):
        tensor = tensor.contiguous()
        content[name] = _Written(tensor, str(number))
        elements = tensor.view(-1).view(torch.uint8).numpy()
        write_record(archive, f"data/{number}", elements.tobytes())
    for other, name in tied.items():
        content[other] = content[name]
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(content)
    write_record(archive, "data.pkl", pickled.getvalue())


def write_record(archive: Any, name: str, data: bytes) -> None:
    archive.write_record(name, data, len(data))
    heart.beat()
