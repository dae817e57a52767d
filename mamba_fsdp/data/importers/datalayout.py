"""Composer's DataLayout: FILE.npy of little-endian int32 without a header, FILE.npy.size with their number.

Bits 0 to 15 are the token, 16 to 29 its position in its document, 30 says whether it counts in the loss. Positions have
14 bits: in longer documents they begin at 0 again, or stay at the highest.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from config.dataset_config import DatasetConfig
from mamba_fsdp.data.corpus import Document, Shard
from mamba_fsdp.errors import UserError

HIGHEST = (1 << 14) - 1  # position
WINDOW = 1 << 20  # tokens read at a time


def datalayout_documents(shard: Shard, options: DatasetConfig) -> Iterator[list]:
    """Yields the documents of each window. Raises UserError for a file that is no such file, and where it leaves tokens
    out of the loss."""
    name = shard.name
    _check_size(name)
    entries = np.memmap(name, "<i4", "r")
    eos = int(options.eos_token) if options.eos_token.isdecimal() else -1
    for start in range(0, len(entries), WINDOW):
        first = max(0, start - 1)
        window = np.array(entries[first : start + WINDOW + 1])  # with a neighbour at each end
        body = window[start - first :][:WINDOW]
        positions = body >> 16 & HIGHEST
        if ((positions > 0) & (body >> 30 & 1 == 0)).any():
            raise UserError(
                f"{name}: it leaves tokens out of the loss (bit 30), which a token store can't say; set that "
                "bit, or leave these tokens out"
            )
        starts = document_starts(window, eos) - (start - first)
        inner = starts[(0 < starts) & (starts < len(body))]
        pieces = np.split((body & 0xFFFF).astype(np.int64), inner)
        documents = [Document(ids) for ids in pieces]
        begins = start == 0 or 0 in starts
        documents[0] = documents[0]._replace(begins=begins)
        ends = start + len(body) == len(entries) or len(body) in starts
        documents[-1] = documents[-1]._replace(ends=ends)
        yield documents


def document_starts(entries: np.ndarray, eos: int) -> np.ndarray:
    """Where in `entries` (n,) documents begin, the first entry left out.

    A position that does not follow the one before begins a document. But behind the highest a document goes on: at the
    highest again, or at 0 unless it ended with `eos` or has stayed at the highest.
    """
    positions = entries >> 16 & HIGHEST
    before = positions[:-1]
    after = positions[1:]
    has_ended = (entries[:-1] & 0xFFFF) == eos
    has_stayed = np.append(False, before[:-1] == HIGHEST)[: len(before)]
    wraps = (before == HIGHEST) & (after == 0) & ~has_ended & ~has_stayed
    stays = (before == HIGHEST) & (after == HIGHEST)
    return np.flatnonzero((after != before + 1) & ~wraps & ~stays) + 1


def _check_size(name):
    said = Path(f"{name}.size")
    size = Path(name).stat().st_size
    try:
        count = int(said.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{name}: no DataLayout file, or copied without {said.name}, which says how many tokens it holds "
            f"({error})"
        ) from error
    if size != 4 * count or not count:
        raise UserError(
            f"{name}: {size} bytes, but {said.name} says {count} tokens, which are {4 * count}; copy both again"
        )
