"""A state dict as torch.save writes it, but one tensor at a time: a zip archive of data/0, data/1, ... and data.pkl.

In the pickle each tensor is what torch.Tensor.__reduce_ex__ makes of it, its storage a persistent id, as in
torch.serialization._save; nothing is compressed, and data begins at multiples of 64 bytes, so that it can be mapped.
"""

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mamba_fsdp.checkpoint.files import BLOCK
from mamba_fsdp.heartbeat import heart


class _Written:
    """Stands in the pickle for a tensor whose elements are in the archive."""

    def __init__(self, tensor: torch.Tensor, key: str):
        kind = getattr(torch, tensor.new_empty(0)._typed_storage()._pickle_storage_type())
        storage = "storage", kind, key, "cpu", tensor.numel()
        self.arguments: tuple[Any, ...] = (
            storage,
            0,
            tuple(tensor.shape),
            tensor.stride(),
            False,
            OrderedDict(),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v2, self.arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        return obj if isinstance(obj, tuple) and obj[:1] == ("storage",) else None


def write_pth(
    path: Path, tensors: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str]
) -> None:
    """Write (name, CPU tensor) pairs and, for each of `tied`, {other name: name}, a second name. Raises OSError."""
    content: dict[str, _Written] = {}
    pickled = io.BytesIO()
    with open(path, "xb") as file, zipfile.ZipFile(file, "w") as archive:
        for number, (name, tensor) in enumerate(tensors):
            tensor = tensor.contiguous()
            add_record(
                archive, file, f"data/{number}", tensor.view(-1).view(torch.uint8).numpy().data
            )
            content[name] = _Written(tensor, str(number))
        content |= {other: content[name] for other, name in tied.items()}
        _Pickler(pickled, protocol=2).dump(content)
        add_record(archive, file, "data.pkl", pickled.getbuffer())
        add_record(archive, file, "byteorder", memoryview(sys.byteorder.encode()))
        add_record(archive, file, "version", memoryview(b"3\n"))


def add_record(archive, file, name, data):
    record = zipfile.ZipInfo(f"archive/{name}")
    header = (
        30 + len(record.filename) + 20 + 4
    )  # the fixed part, the name, ZIP64's field, the beginning of the padding
    padding = -(file.tell() + header) % 64
    record.extra = struct.pack("<2sH", b"FB", padding) + padding * b"Z"
    with archive.open(record, "w", force_zip64=True) as target:
        for offset in range(0, len(data), BLOCK):
            target.write(data[offset : offset + BLOCK])
            heart.beat()
