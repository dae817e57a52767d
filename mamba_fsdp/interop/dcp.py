"""Folders of torch.distributed.checkpoint, as fms-fsdp and Composer write sharded models: .metadata and *.distcp.

.metadata is a pickle: the size and chunks of each tensor, and in which file, from which byte on, each chunk lies,
itself a file of torch.save. Nothing in it is executed (checkpoint/pickles.py); what is no tensor is passed over.
"""

import io
import math
import pickle
from functools import partial
from pathlib import Path

import torch

from mamba_fsdp.checkpoint.pickles import read_plain
from mamba_fsdp.checkpoint.tensors import Tensors
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.parallel.world import World

METADATA = ".metadata"
CONVERSION = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {0} {0}.pth"


def open_dcp(folder: Path, world: World) -> Tensors:
    """A folder's tensors, of which each rank reads the chunks that it needs. Called by all ranks. Raises UserError."""
    sizes, chunks = world.on_rank0(lambda: _careful(folder / METADATA, partial(_read_metadata, folder)))

    def read(name, start, stop):
        row, found = math.prod(sizes[name][1:]), []
        for first, rows, file, offset, count in chunks[name]:  # one below the other: one after the other when flattened
            low, high = first * row, (first + rows) * row
            if max(low, start) < min(high, stop):
                chunk = _careful(folder / file, partial(_read_chunk, folder / file, offset, count, high - low))
                found.append(chunk[max(start, low) - low:min(stop, high) - low])
        return torch.cat(found)

    return Tensors(folder, sizes, {}, read)


def _careful(path, read):
    try:
        return read()
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, AttributeError, LookupError, TypeError,
            ValueError) as error:
        raise UserError(f"{path} is damaged or holds more than tensors ({first_line(error)}); copy it again, or where "
                        f"you trust it: {CONVERSION.format(path.parent)}") from None


def _read_metadata(folder):
    """{name: shape}, {name: [(first row, rows, file, offset, bytes) of each chunk, from above]}."""
    content = read_plain(folder / METADATA)
    entries = {name: entry for name, entry in content.state_dict_metadata.items() if hasattr(entry, "chunks")}
    places = {(index.fqn, tuple(getattr(index, "offset", None) or ())): stored
              for index, stored in content.storage_data.items()}
    sizes, chunks = {name: tuple(entry.size) for name, entry in entries.items()}, {}
    for name, entry in entries.items():
        chunks[name], end = [], 0
        for chunk in sorted(entry.chunks, key=lambda chunk: tuple(chunk.offsets)):
            stored = places[name, tuple(chunk.offsets)]
            first, rows = (chunk.offsets[0], chunk.sizes[0]) if sizes[name] else (0, 1)  # of a single number
            if first != end or tuple(chunk.sizes[1:]) != sizes[name][1:] or Path(stored.relative_path).name != (
                    stored.relative_path) or getattr(stored, "transform_descriptors", None):
                raise ValueError(f"{name} is cut along other than its first dimension, compressed, or in another place")
            chunks[name].append((first, rows, stored.relative_path, stored.offset, stored.length))
            end = first + rows
        if end != (sizes[name] or (1,))[0]:
            raise ValueError(f"the chunks of {name} are not the whole of it")
    return sizes, chunks


def _read_chunk(path, offset, count, size):
    with open(path, "rb") as file:
        file.seek(offset)
        chunk = torch.load(io.BytesIO(file.read(count)), "cpu", weights_only=True)
    if chunk.numel() != size:
        raise ValueError(f"a chunk of {chunk.numel()} numbers, not {size}")
    return chunk.reshape(-1)
