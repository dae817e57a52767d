"""Arrow files. fms-fsdp's hold a document in each record batch, as plain integers; others a document in each row."""

import mmap
from collections.abc import Iterator

import pyarrow
from pyarrow import types

from config.dataset_config import DatasetConfig
from mamba_fsdp.data.arrow_columns import column_of, plain_ids, rows_of
from mamba_fsdp.data.corpus import Document, Shard
from mamba_fsdp.errors import UserError

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def arrow_documents(shard: Shard, options: DatasetConfig) -> Iterator[list]:
    """Yields the documents of each record batch. Raises UserError for broken files."""
    name = shard.name
    for batch in _batches(name):
        column = column_of(name, pyarrow.Table.from_batches([batch]), options.text_column)
        held = column.type.value_type if types.is_dictionary(column.type) else column.type
        if types.is_integer(held):
            yield [Document(plain_ids(name, column))]
        else:
            yield [Document(row) for row in rows_of(name, column)]


def _batches(name: str) -> Iterator[pyarrow.RecordBatch]:
    with open(name, "rb") as file:  # by Python, for names that are no UTF-8
        whole = pyarrow.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if whole[:6].to_pybytes() == b"ARROW1":
            reader = pyarrow.ipc.open_file(whole)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
        elif whole[-8:].to_pybytes() == END_OF_STREAM:
            yield from pyarrow.ipc.open_stream(whole)
        else:
            raise UserError(f"{name}: it ends before its end, or is no Arrow file; copy it again")
