"""Tensors in safetensors files as transformers lays them out: model.safetensors, or several and an index."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mamba_fsdp.checkpoint.tensors import Tensors
from mamba_fsdp.errors import UserError
from mamba_fsdp.storage import read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 2 << 30  # each file is in memory once while it is written


def open_safetensors(source: Path) -> Tensors:
    """Returns the Tensors of a file, or of those that an index names, read when asked for. Raises UserError for a
    missing or damaged one."""
    expected: dict[Path, list[str]] = {source: []}  # the names that each file has to hold
    if source.name == INDEX:
        index = read_object(source, {"weight_map": {"": ...}}, "copy or download it again")
        expected = {}
        for name, file_name in index["weight_map"].items():
            expected.setdefault(source.parent / file_name, []).append(name)
    files: dict[str, Any] = {}  # by parameter name, the open file that it is in
    for path, names in expected.items():
        file = _open(path)
        for name in file.keys():
            files[name] = file
        lacking = sorted(set(names) - set(file.keys()))
        if lacking:
            raise UserError(f"{path} lacks {lacking[0]}, which {INDEX} says is in it")
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}

    def read(name, start, stop):
        return files[name].get_tensor(name).reshape(-1)[start:stop]

    return Tensors(source, shapes, {}, read)


def _open(path):
    try:
        open(path, "rb").close()  # safe_open says "no such file" whatever is wrong
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path} is missing, but {INDEX} names it; copy or download it") from None
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise UserError(
            f"{path} ({path.stat().st_size:,} bytes) is cut short or damaged ({error}); copy or "
            "download it again"
        ) from None


def write_safetensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes (name, tensor) pairs, one file at a time. Raises OSError or SafetensorError as the disk does."""
    umask = os.umask(0)
    os.umask(umask)
    written: dict[
        Path, list[str]
    ] = {}  # under names for the time being: how many there will be is not known
    total = 0
    for shard in _shards(tensors, shard_bytes):
        path = folder / f"{len(written)}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(0o666 & ~umask)  # the library lets nobody else read it
        written[path] = list(shard)
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(written) == 1:
        path.rename(folder / SINGLE)
        return
    weight_map = {}
    for number, (path, names) in enumerate(written.items(), 1):
        final = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        path.rename(folder / final)
        for name in names:
            weight_map[name] = final
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def _shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard = {}
            size = 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    yield shard
