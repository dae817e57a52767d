"""Flat files of tokens as nanoGPT makes them: NAME.bin of little-endian uint16, without a header.

Documents are laid end to end with a separator that the file does not name. A folder is read in the order of its files'
names, without those for validation; where it has a train.bin, that is its training split and val.bin the other.
"""

import re
from pathlib import Path

import numpy as np

from config.train_config import ReadingConfig
from mamba_fsdp.data.foreign.indexed import Plan, Rows
from mamba_fsdp.errors import UserError

FORMAT = "nanoGPT"
LLM_C = (20240520).to_bytes(
    4, "little"
)  # what its files begin with, which have a header of 1,024 bytes
TORCH = (
    b"PK\x03\x04",
    b"\x80\x02\x8a\n",
)  # what torch.save writes begins so: models are called .bin, too
HELD_OUT = re.compile(r"(^|[_-])(val|valid|validation|test)([_.-]|$)")


def recognise(path: Path) -> bool:
    if path.is_dir():
        return any(map(recognise, sorted(path.glob("*.bin"))[:1])) and not any(path.glob("*.doc"))
    if path.suffix != ".bin" or not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) not in TORCH


def plan(path: Path, reading: ReadingConfig) -> Plan:
    files = sorted(path.glob("*.bin")) if path.is_dir() else [path]
    trained_on = [file.name for file in files if not HELD_OUT.search(file.name)]
    return Plan(files[0].parent, trained_on or [file.name for file in files], find_rows, False)


def find_rows(path: Path) -> Rows:
    """All of a file as one row. Raises UserError for one that is no such file, or truncated."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if file.read(4) == LLM_C:
            raise UserError(
                f"{path}: begins with llm.c's header; take it off: tail -c +1025 {path} > NEW.bin"
            )
    if size % 2:
        raise UserError(f"{path}: {size} bytes, no whole number of uint16 tokens; copy it again")
    return Rows("<u2", np.array([0]), np.array([size // 2]))
