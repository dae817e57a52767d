"""Folders that `datasets` wrote with save_to_disk."""

from typing import Any

import datasets
import numpy as np
from pyarrow import compute

from mamba_fsdp.data.arrow_columns import column_of, named_errors
from mamba_fsdp.errors import UserError

ROWS = 1024
UNCOUNTED = {
    "labels": -100,
    "attention_mask": 0,
}  # {column: its value for tokens left out of the loss}


def open_saved_to_disk(folder: str, split: str, column: str) -> datasets.IterableDataset:
    """The rows of a folder, of its `split` where it has several. Raises UserError where there is no such split, and
    where tokens are left out of the loss."""
    dataset = _load(folder, split)
    return dataset.to_iterable_dataset()


def rows_are_blocks(folder: str, split: str, column: str) -> bool:
    """Whether all rows but the last are token ids of one length: one long text that was cut. Raises UserError for rows
    that leave tokens out of the loss."""
    with named_errors(folder, "save_to_disk"):
        return _rows_are_blocks(folder, split, column)


def _rows_are_blocks(folder, split, column):
    lengths: list[np.ndarray] = []
    for table in _load(folder, split).with_format("arrow").iter(batch_size=ROWS):
        check_all_count(folder, table)
        rows = column_of(folder, table, column)
        if not hasattr(rows.type, "value_type"):
            return False
        sizes = compute.list_value_length(rows).fill_null(0)
        lengths.append(sizes.to_numpy())
    found = np.concatenate(lengths) if lengths else np.zeros(0)
    return len(found) > 1 and bool((found[:-1] == found.max()).all())


def check_all_count(folder: str, table: Any) -> None:
    """Raises UserError where a column says of some tokens that they don't count in the loss."""
    for name, value in UNCOUNTED.items():
        if name not in table.column_names or not hasattr(table[name].type, "value_type"):
            continue
        flags = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        if (flags == value).any():
            raise UserError(
                f"{folder}: its {name} leave tokens out of the loss, which a token store can't say; take "
                "these tokens out of its rows, or remove that column"
            )


def _load(folder: str, split: str) -> Any:
    loaded = datasets.load_from_disk(folder)
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    name = split or ("train" if "train" in loaded or len(loaded) != 1 else next(iter(loaded)))
    if name not in loaded:
        raise UserError(
            f"{folder}: no split {name!r}; name one of {', '.join(loaded)} with --split"
        )
    return loaded[name]
