"""Where the tokens lie in files of the Arrow IPC formats, whose buffers are stored as they are in memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mamba_fsdp.data.foreign.indexed import Rows
from mamba_fsdp.errors import UserError, first_line

COLUMNS = ("tokens", "input_ids")  # looked for where none is named
MASKS = {
    "labels": -100,
    "attention_mask": 0,
}  # {column: what it says of a token that does not count}
NONE, START = np.zeros(0, np.int64), np.zeros(1, np.int64)
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def find_rows(path: Path, column: str) -> Rows:
    """The rows of `column` of a file: its lists, or where it holds plain numbers its record batches, as fms writes
    documents. Raises UserError."""
    begins: list[int] = []
    dtype, bounds, lengths = None, [NONE], [NONE]
    for whole, batch in batches(path):
        values, starts, sizes = _lists(path, column, batch)
        dtype = dtype or np.dtype(values.type.to_pandas_dtype())
        if values.null_count:
            raise UserError(f"{path}: column {column} has places without a token (null)")
        begins.append(values.buffers()[1].address - whole.address if len(values) else 0)
        if not 0 <= begins[-1] < whole.size:
            raise UserError(
                f"{path}: its content is compressed; write it without, or make a token store of it:\n"
                f"  {store_command(path.parent, column)}"
            )
        bounds.append(starts + values.offset if values.offset else starts)
        lengths.append(sizes)
    dtype = dtype or np.dtype("<u4")
    offsets = np.repeat(np.array(begins, np.int64), [len(sizes) for sizes in lengths[1:]])
    return Rows(
        dtype.str, offsets + np.concatenate(bounds) * dtype.itemsize, np.concatenate(lengths)
    )


def batches(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yields (the whole file as a buffer, a record batch that lies in it). Raises UserError for a broken file."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file:
            whole = file.read_buffer()
            if whole[:6].to_pybytes() == b"ARROW1":
                reader = pyarrow.ipc.open_file(whole)
                yield from (
                    (whole, _checked(reader.get_batch(number)))
                    for number in range(reader.num_record_batches)
                )
                return
            if whole[-8:].to_pybytes() != END_OF_STREAM:
                raise UserError(
                    f"{path}: it ends before its end, or is no Arrow file; copy it again"
                )
            yield from ((whole, _checked(batch)) for batch in pyarrow.ipc.open_stream(whole))
    except (pyarrow.ArrowException, OSError) as error:  # OSError: a message that is cut off
        raise UserError(
            f"{path}: broken or truncated ({first_line(error)}); copy it again"
        ) from error


def _checked(batch):
    """A batch whose buffers are as long as it says. Raises ArrowInvalid."""
    batch.validate()
    return batch


def undamaged(path: str | Path, column: str, array: Any) -> Any:
    """A column's array, if its offsets lead nowhere else: Arrow follows any. Raises UserError."""
    import pyarrow

    try:
        return array.validate(full=True) or array
    except pyarrow.ArrowException as error:
        raise UserError(
            f"{path}: column {column} is damaged ({first_line(error)}); copy it again"
        ) from error


def column_of(path: Path, wanted: str) -> str:
    """The column that holds tokens, by the first batch of a file; `wanted` where that is no "". Raises UserError where
    there is none, or text."""
    from pyarrow import types

    for _, batch in batches(path):
        names = [name for name in ([wanted] if wanted else COLUMNS) if name in batch.schema.names]
        if not names:
            text = [
                field.name
                for field in batch.schema
                if types.is_string(field.type) or types.is_large_string(field.type)
            ]
            remedy = (
                f"it holds text, to be tokenised first:\n  {store_command(path.parent, text[0])}"
                if text and not wanted
                else f"name the one that holds tokens: --col_name={'|'.join(batch.schema.names)}"
            )
            raise UserError(f"{path}: has no column {wanted or ' or '.join(COLUMNS)}; {remedy}")
        return names[0]
    return wanted or COLUMNS[0]


def check_no_mask(path: Path) -> None:
    """Raises UserError where the first batch of a file says of some tokens that they don't count in the loss."""
    for _, batch in batches(path):
        for name, uncounted in MASKS.items():
            if name in batch.schema.names and hasattr(batch.schema.field(name).type, "value_type"):
                rows = undamaged(path, name, batch.column(name))
                if (rows.flatten().to_numpy(zero_copy_only=False) == uncounted).any():
                    raise UserError(
                        f"{path}: its {name} leave tokens out of the loss, which is not read here; remove "
                        "that column, or make DataLayout files of it (docs/data.md)"
                    )
        return


def store_command(path: Path, column: str) -> str:
    """The command that makes a token store of the text or the tokens in a column of the files of `path`."""
    tokens = " --tokenizer=THE_ONE_THAT_MADE_THEM" if column in COLUMNS else ""
    return f".venv/bin/python get_dataset.py {path} data/{path.stem} --text_column={column}{tokens}"


def _lists(path, name, batch):
    """(all values, where each row begins in them, its length) of a column of lists of integers, or one of integers."""
    from pyarrow import types

    if name not in batch.schema.names:
        raise UserError(f"{path}: has no column {name}, but {', '.join(batch.schema.names)}")
    array = undamaged(path, name, batch.column(name))
    if types.is_integer(array.type):
        return array, START, np.array([len(array)])
    if not types.is_integer(getattr(array.type, "value_type", array.type)):
        raise UserError(f"{path}: column {name} is {array.type}, not token ids")
    if types.is_fixed_size_list(array.type):
        values, bounds = array.values, np.arange(len(array) + 1) * array.type.list_size
    else:
        values, bounds = array.values, array.offsets.to_numpy().astype(np.int64)
    sizes = np.diff(bounds)
    if array.null_count:
        sizes[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return values, bounds[:-1], sizes
