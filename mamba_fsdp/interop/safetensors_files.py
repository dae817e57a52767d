"""Tensors in safetensors files as transformers lays them out: model.safetensors, or several and an index."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mamba_fsdp.checkpoint.tensors import Tensors
from mamba_fsdp.errors import UserError
from mamba_fsdp.storage import read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 2 << 30  # each file is in memory once while it is written


def open_safetensors(source: Path) -> Tensors:
    """A file, or those that an index names, as Tensors, read when asked for. Raises UserError for a missing or damaged
    one."""
    files: dict[str, Any] = {}  # parameter name: the open file that it is in
    for path, names in (_files(source) if source.name == INDEX else {source: []}).items():
        try:
            open(path, "rb").close()  # safe_open says "no such file" whatever is wrong
            file = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise UserError(
                f"{path} is missing, but {INDEX} names it; copy or download it"
            ) from None
        except OSError as error:
            raise UserError(f"can't read {path}: {error.strerror or error}") from None
        except SafetensorError as error:
            raise UserError(
                f"{path} ({path.stat().st_size:,} bytes) is cut short or damaged ({error}); copy or "
                "download it again"
            ) from None
        files |= dict.fromkeys(file.keys(), file)
        if lacking := [name for name in names if name not in file.keys()]:
            raise UserError(f"{path} lacks {lacking[0]}, which {INDEX} says is in it")
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}
    return Tensors(
        source,
        shapes,
        {},
        lambda name, start, stop: files[name].get_tensor(name).reshape(-1)[start:stop],
    )


def _files(index):
    """{path: the names that the index says are in it}."""
    files = dict[Path, list[str]]()
    for name, file in read_object(index, {"weight_map": {"": ...}}, "copy or download it again")[
        "weight_map"
    ].items():
        files.setdefault(index.parent / file, []).append(name)
    return files


def write_safetensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write (name, tensor) pairs, one file at a time. Raises OSError or SafetensorError as the disk does."""
    contents, total = [], 0
    weight_map: dict[str, str] = {}
    os.umask(umask := os.umask(0))
    for number, shard in enumerate(_shards(tensors, shard_bytes)):
        save_file(shard, folder / f"{number}.safetensors", metadata={"format": "pt"})
        (folder / f"{number}.safetensors").chmod(
            0o666 & ~umask
        )  # the library lets nobody else read it
        contents.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    for number, names in enumerate(contents):
        final = (
            f"model-{number + 1:05d}-of-{len(contents):05d}.safetensors"
            if len(contents) > 1
            else SINGLE
        )
        (folder / f"{number}.safetensors").rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    if len(contents) > 1:
        (folder / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
        )


def _shards(tensors, shard_bytes):
    shard, size = {}, 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    yield shard
