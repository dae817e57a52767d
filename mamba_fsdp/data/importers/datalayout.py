"""Composer's DataLayout: FILE.npy of little-endian int32 without a header, FILE.npy.size with their number.

Bits 0 to 15 are the token, 16 to 29 its position in its document, 30 says whether it counts in the loss. Positions have
14 bits: in longer documents they begin at 0 again, or stay at the highest.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from config.dataset_config import DatasetConfig
from mamba_fsdp.errors import UserError

POSITIONS = 1 << 14
WINDOW = 1 << 20  # tokens read at a time


def datalayout_rows(files: list[str], options: DatasetConfig) -> Iterator[dict]:
    """Yields {"documents": [(ids, whether the document ends), ...]}. Raises UserError where a file's size is not what
    is said beside it."""
    eos = int(options.eos_token) if options.eos_token.isdecimal() else None
    for name in files:
        entries = _map(name)
        for start in range(0, len(entries), WINDOW):
            window = np.array(
                entries[start : start + WINDOW + 1]
            )  # one more: does a document start there?
            starts = document_starts(window, eos)
            body = window[:WINDOW] & 0xFFFF
            inner = starts[starts < len(body)]
            _check_all_count(name, window[:WINDOW])
            ids = np.split(body.astype(np.int64), inner)
            ends_here = start + len(body) == len(entries) or len(body) in starts
            yield {"documents": [(each, True) for each in ids[:-1]] + [(ids[-1], ends_here)]}


def document_starts(entries: np.ndarray, eos: int | None) -> np.ndarray:
    """Where in `entries` (n,) documents begin, the first entry left out.

    A position that does not follow the one before begins a document; but behind the highest one a document goes on at 0,
    unless it ended with `eos`, or at the highest again.
    """
    positions = entries >> 16 & (POSITIONS - 1)
    before, after = positions[:-1], positions[1:]
    follows = after == before + 1
    was_highest = before == POSITIONS - 1
    goes_on = was_highest & ((after == 0) | (after == POSITIONS - 1))
    if eos is not None:
        goes_on &= (entries[:-1] & 0xFFFF) != eos
    return np.flatnonzero(~(follows | goes_on)) + 1


def _check_all_count(name, entries):
    is_first = (entries >> 16 & (POSITIONS - 1)) == 0  # which no loss counts anyway
    if (is_first | (entries >> 30 & 1 == 1)).all():
        return
    raise UserError(
        f"{name}: it leaves tokens out of the loss (bit 30), which a token store can't say; set that bit, or "
        "leave these tokens out"
    )


def _map(name: str) -> np.ndarray:
    said = Path(f"{name}.size")
    size = Path(name).stat().st_size
    with open(name, "rb") as file:
        if file.read(6) == b"\x93NUMPY":
            raise UserError(
                f"{name}: a NumPy file, not the bare integers of DataLayout; make a token store of its text"
            )
    try:
        count = int(said.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{said}: does not say how many tokens {Path(name).name} holds ({error}); copy it again"
        ) from error
    if size != 4 * count:
        raise UserError(
            f"{name}: {size} bytes, but {said.name} says {count} tokens, which are {4 * count}; copy both again"
        )
    if not count:
        return np.zeros(0, np.int32)
    return np.memmap(name, "<i4", "r")
