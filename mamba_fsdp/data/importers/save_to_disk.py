"""Folders that `datasets` wrote with save_to_disk."""

from typing import Any

import datasets
from pyarrow import compute

from mamba_fsdp.data.arrow_columns import column_of, named_errors
from mamba_fsdp.errors import UserError

ROWS = 1024
UNCOUNTED = {
    "labels": -100,
    "attention_mask": 0,
}  # {column: its value for tokens left out of the loss}


def open_saved_to_disk(folder: str, split: str) -> datasets.Dataset:
    """The rows of a folder, or of its `split` where it has several, mapped into memory."""
    loaded = datasets.load_from_disk(folder)
    return loaded[split] if split else loaded


def rows_are_blocks(folder: str, split: str, column: str) -> bool:
    """Whether the first ROWS rows, but for the last, are token ids of one length: a long text that was cut. Raises
    UserError for a broken folder."""
    with named_errors(folder, "save_to_disk"):
        table = open_saved_to_disk(folder, split).with_format("arrow")[:ROWS]
        array = column_of(folder, table, column)
        if not hasattr(array.type, "value_type"):
            return False
        lengths = compute.list_value_length(array).fill_null(0).to_numpy()
    return len(lengths) > 1 and bool((lengths[:-1] == lengths.max()).all())


def check_all_count(folder: str, table: Any) -> None:
    """Raises UserError for rows that leave tokens out of the loss."""
    for name, value in UNCOUNTED.items():
        if name not in table.column_names or not hasattr(table[name].type, "value_type"):
            continue
        flags = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        if (flags == value).any():
            raise UserError(
                f"{folder}: its {name} leave tokens out of the loss, which a token store can't say; take "
                "these tokens out of its rows, or remove that column"
            )
