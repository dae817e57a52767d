"""DataLayout files, which Composer's trainers map: little-endian int32 without a header, though they are called .npy.

Each integer says a token, its position in its document and whether it counts in the loss: see LAYOUT_BITS. Beside each
file lies FILE.size, which says in decimal how many there are. A folder of them is read in the order of their names.
"""

from pathlib import Path

import numpy as np

from config.train_config import ReadingConfig
from mamba_fsdp.data.foreign.indexed import Plan, Rows
from mamba_fsdp.errors import UserError

FORMAT = "DataLayout"


def recognise(path: Path) -> bool:
    return (
        path.is_file()
        and (path.suffix == ".npy" or Path(f"{path}.size").is_file())
        or any(path.glob("*.npy"))
    )


def plan(path: Path, reading: ReadingConfig) -> Plan:
    files = sorted(path.glob("*.npy")) if path.is_dir() else [path]
    return Plan(
        files[0].parent,
        [file.name for file in files],
        find_rows,
        False,
        "with its positions and loss mask, ",
        layout=True,
    )


def find_rows(path: Path) -> Rows:
    """All of a file as one row. Raises UserError where its size is not what is said beside it."""
    said, size = Path(f"{path}.size"), path.stat().st_size
    with open(path, "rb") as file:
        if file.read(6) == b"\x93NUMPY":
            raise UserError(
                f"{path}: a NumPy file, not the bare integers of DataLayout; make a token store of its "
                "text with get_dataset.py"
            )
    try:
        count = int(said.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{said}: does not say how many tokens {path.name} holds ({error}); copy it again"
        ) from error
    if size != 4 * count:
        raise UserError(
            f"{path}: {size} bytes, but {said.name} says {count} tokens, which are {4 * count}; copy both "
            "again"
        )
    return Rows("<i4", np.zeros(1, np.int64), np.array([count]))
