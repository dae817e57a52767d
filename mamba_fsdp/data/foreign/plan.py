"""What a format's module finds at a path."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Rows(NamedTuple):
    """What lies in a file: its documents or other rows, in order."""

    dtype: str
    offsets: np.ndarray  # (rows,) int64, bytes
    lengths: np.ndarray  # (rows,) int64, tokens


class DataFile(NamedTuple):
    """A file of a source, as it was when its index was made."""

    name: str  # from the source's folder on
    size: int  # bytes
    changed: int  # nanoseconds: its mtime
    dtype: str  # of the tokens
    documents: int  # in the file itself, the empty ones too
    tokens: int  # in the file itself
    pieces: int
    length: int  # tokens, with what is added to documents and without what is stripped
    digest: str  # of the pieces, and of samples of their content


class Plan(NamedTuple):
    """The files of a source and how they are to be read."""

    root: Path
    names: Sequence[str]  # of the files, from root on
    find_rows: Callable[[Path], Rows]  # of a module, so that it can be sent to another process; raises UserError
    documents: bool  # rows are documents, to end with eos; else they are laid end to end as they are
    told: str = ""  # what the user should know of it
    block: int = 0  # of how many tokens each row must be, but the last of a file; 0: of any
    layout: bool = False  # as Rule has it
    check: Callable[[Sequence[DataFile]], None] = lambda files: None  # raises UserError where they are not as told
