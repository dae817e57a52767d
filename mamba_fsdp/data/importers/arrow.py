"""Arrow files. fms-fsdp's hold a document in each record batch, as plain integers; others a document in each row."""

from collections.abc import Iterator
from typing import Any

import pyarrow
from pyarrow import types

from config.dataset_config import DatasetConfig
from mamba_fsdp.data.arrow_columns import column_of, plain_ids, rows_of
from mamba_fsdp.errors import UserError, first_line

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def arrow_rows(files: list[str], options: DatasetConfig) -> Iterator[dict]:
    """Yields {"documents": [(text or ids, True), ...]} of each record batch. Raises UserError for broken files."""
    for name in files:
        try:
            for batch in _batches(name):
                column = column_of(name, batch, options.text_column)
                if types.is_integer(column.type):
                    yield {"documents": [(plain_ids(name, column.combine_chunks()), True)]}
                else:
                    yield {"documents": [(row, True) for row in rows_of(name, column)]}
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(
                f"{name}: broken or truncated ({first_line(error)}); copy it again"
            ) from error


def _batches(name: str) -> Iterator[Any]:
    with pyarrow.memory_map(name) as file:
        whole = file.read_buffer()
        if whole[:6].to_pybytes() == b"ARROW1":
            reader = pyarrow.ipc.open_file(whole)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
            return
        if whole[-8:].to_pybytes() != END_OF_STREAM:
            raise UserError(f"{name}: it ends before its end, or is no Arrow file; copy it again")
        yield from pyarrow.ipc.open_stream(whole)
