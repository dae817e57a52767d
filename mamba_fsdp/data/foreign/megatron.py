"""Megatron's indexed datasets: PREFIX.bin, the tokens, and PREFIX.idx, which says what lies where in it.

PREFIX.idx, little endian: magic, version (uint64), code of the tokens' type (uint8), numbers of sequences and of
document bounds (uint64); then of each sequence its length (int32) and its place in bytes (int64), and the bounds of the
documents in sequences (int64). A folder holds one or several, read in the order of their names.
"""

import struct
from pathlib import Path

import numpy as np

from config.train_config import ReadingConfig
from mamba_fsdp.data.foreign.indexed import Plan, Rows
from mamba_fsdp.errors import UserError

FORMAT = "Megatron"
MAGIC, HEADER = b"MMIDIDX\0\0", struct.Struct("<9sQBQQ")
DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def recognise(path: Path) -> bool:
    return _index_of(path).is_file() or any(path.glob("*.idx"))


def plan(path: Path, reading: ReadingConfig) -> Plan:
    files = [
        file.with_suffix(".bin")
        for file in (sorted(path.glob("*.idx")) if path.is_dir() else [_index_of(path)])
    ]
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(f"{missing[0]}: missing beside its .idx; copy both")
    return Plan(files[0].parent, [file.name for file in files], find_rows, reading.pack != "none")


def find_rows(path: Path) -> Rows:
    """The documents of a .bin file as its .idx says. Raises UserError where that is broken."""
    index = path.with_suffix(".idx")
    content = np.memmap(index, np.uint8, "r") if index.stat().st_size else np.zeros(0, np.uint8)
    fields = (
        HEADER.unpack(content[: HEADER.size].tobytes())
        if len(content) >= HEADER.size
        else (b"", 0, 0, 0, 0)
    )
    magic, version, code, sequences, bounds = fields
    if magic != MAGIC or version != 1 or code not in DTYPES:
        raise UserError(
            f"{index}: no index of Megatron's of version 1 with whole numbers as tokens; make it again"
        )
    ends = np.cumsum([HEADER.size, sequences * 4, sequences * 8, bounds * 8])
    if len(content) < ends[-1]:
        raise UserError(
            f"{index}: {len(content)} bytes, but its header asks for {ends[-1]}; copy it again"
        )
    lengths, places, documents = (
        np.frombuffer(content[begin:end].tobytes(), kind)
        for begin, end, kind in zip(ends, ends[1:], ("<i4", "<i8", "<i8"))
    )
    size = np.dtype(DTYPES[code]).itemsize
    total = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if (
        not bounds
        or documents[0]
        or documents[-1] != sequences
        or (np.diff(documents) < 0).any()
        or (places != total[:-1] * size).any()
    ):
        raise UserError(
            f"{index}: its documents are not those that lie one behind the other in {path.name}; copy both "
            "again"
        )
    if (there := path.stat().st_size) != total[-1] * size:
        raise UserError(
            f"{path}: {there} bytes, but {index.name} says {total[-1] * size}; copy both again"
        )
    begin = total[documents]
    return Rows(DTYPES[code], begin[:-1] * size, np.diff(begin))


def _index_of(path):
    """Its .idx, of a prefix, a .bin or a .idx file."""
    return path.with_suffix(".idx") if path.suffix in (".bin", ".idx") else Path(f"{path}.idx")
