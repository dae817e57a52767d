"""Columns of Arrow tables as texts or token ids, whatever type they are stored in."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow
from pyarrow import compute, types

from mamba_fsdp.errors import UserError, first_line

TOKEN_COLUMNS = ("tokens", "input_ids")  # looked for where there is no --text_column


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
    """A table's or record batch's column; document.text is the field text of document. Where there is no column
    `text`, which is the default, one of TOKEN_COLUMNS. Raises UserError, which begins with the file's `name`."""
    if isinstance(table, pyarrow.RecordBatch):
        table = pyarrow.Table.from_batches([table])
    flat = table
    while column not in flat.column_names:
        wider = flat.flatten()
        if wider.column_names == flat.column_names:
            break
        flat = wider
    if column in flat.column_names:
        return flat[column]
    others = [each for each in TOKEN_COLUMNS if each in table.column_names]
    if others and column == "text":
        return table[others[0]]
    raise UserError(
        f"{name}: there is no column {column!r}; it has: {', '.join(table.column_names)}; name one with "
        "--text_column"
    )


def rows_of(where: str, array: Any) -> list[str | np.ndarray]:
    """A column's rows as texts, or as token ids (n,) int64; null is "" or no ids. Raises UserError, which begins with
    `where`, for other types and for what is damaged."""
    if isinstance(array, pyarrow.ChunkedArray):
        array = array.combine_chunks()
    try:
        array.validate(full=True)  # else wrong offsets are followed anywhere
        if types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if hasattr(array.type, "value_type"):
            return _ids(where, array)
        texts = array.cast(pyarrow.large_string())
    except pyarrow.ArrowException as error:
        raise UserError(
            f"{where}: its column, {array.type}, can't be read as text or token ids ({first_line(error)})"
        ) from error
    return [text or "" for text in texts.to_pylist()]


def plain_ids(where: str, array: Any) -> np.ndarray:
    """Token ids (n,) int64 of an array of integers. Raises UserError."""
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if len(array) and not types.is_integer(array.type):
        raise UserError(f"{where}: holds {array.type}, not token ids")
    if array.null_count:
        raise UserError(f"{where}: has places without a token (null)")
    return array.to_numpy(zero_copy_only=False).astype(np.int64)


def _ids(where, array):
    lengths = compute.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    values = plain_ids(where, array.flatten())
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
