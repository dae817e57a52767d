"""Columns of Arrow tables as texts or token ids, whatever type they are stored in."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow
from pyarrow import compute, types

from mamba_fsdp.errors import UserError, first_line

TOKEN_COLUMNS = ("tokens", "input_ids")  # looked for where there is no column `text`, the default


@contextlib.contextmanager
def named_errors(name: str, kind: str) -> Iterator[None]:
    """Inside, whatever stops a library is a UserError that names the file, which was read as `kind`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or first_line(error)[:300]
        raise UserError(f"{name}: can't be read as {kind} ({reason})") from error


def column_of(name: str, table: Any, column: str) -> Any:
    """A table's column; document.text is the field text of document. Raises UserError, which begins with the file's
    `name`."""
    names = table.column_names
    while column not in table.column_names and any(map(types.is_struct, table.schema.types)):
        table = table.flatten()
    if column in table.column_names:
        return table[column].combine_chunks()
    for other in TOKEN_COLUMNS:
        if column == "text" and other in names:
            return table[other].combine_chunks()
    raise UserError(
        f"{name}: there is no column {column!r}; it has: {', '.join(names)}; name one with --text_column"
    )


def rows_of(name: str, array: Any) -> list[Any]:
    """A column's rows as texts, or as token ids (n,) int64; null is "" or no ids. Raises UserError, which begins with
    the file's `name`, for other types and for what is damaged."""
    try:
        array.validate(full=True)  # else wrong offsets are followed anywhere
        if types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if not hasattr(array.type, "value_type"):
            return array.cast(pyarrow.large_string()).fill_null("").to_pylist()
        lengths = compute.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        ids = plain_ids(name, array.flatten())
        return np.split(ids, np.cumsum(lengths))[:-1]
    except pyarrow.ArrowException as error:
        raise UserError(
            f"{name}: a column of {array.type} can't be read as text or token ids ({first_line(error)})"
        ) from error


def plain_ids(name: str, array: Any) -> np.ndarray:
    """Token ids (n,) int64 of an array of integers. Raises UserError."""
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.null_count:
        raise UserError(f"{name}: has places without a token (null)")
    if len(array) and not types.is_integer(array.type):
        raise UserError(f"{name}: holds lists of {array.type}, not token ids")
    return array.to_numpy(zero_copy_only=False).astype(np.int64)
