"""Columns of parquet, Arrow and CSV files: generators of (rows before, the column's values as an Arrow array, share of
the file read), from `row` or from somewhere before it on. Arrow is imported late: it takes a while."""

import os

from mamba_fsdp.data.documents import check_column, narrow_hint, token_ids
from mamba_fsdp.errors import UserError

ROWS = 128  # read at a time
CSV_RECORD = 1 << 24  # bytes: the longest record of a CSV file


def parquet_arrays(path, column, row):
    """From the row group that holds `row` on."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    steps = path_to(path, column, file.schema_arrow)
    sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    at = group = 0
    while group < len(sizes) and at + sizes[group] <= row:
        at += sizes[group]
        group += 1
    for batch in file.iter_batches(ROWS, row_groups=range(group, len(sizes)), columns=[".".join(steps)],
                                   use_threads=False):
        yield at, at_path(batch, steps), (at + len(batch)) / file.metadata.num_rows
        at += len(batch)


def arrow_arrays(path, column, row):
    """From the first row on."""
    import pyarrow

    with pyarrow.memory_map(path) as source:
        is_file = source.read(6) == b"ARROW1"  # else the stream form, which `datasets` writes
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        steps, at = path_to(path, column, reader.schema), 0
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches)) if is_file else reader
        for number, batch in enumerate(batches, 1):
            done = number / reader.num_record_batches if is_file else source.tell() / source.size()
            yield at, at_path(batch, steps), done
            at += len(batch)


def csv_arrays(path, column, row):
    """From the first row on, of a file whose first line names its columns; in a .tsv file tabs part them."""
    import pyarrow

    try:
        with pyarrow.OSFile(path) as file:
            check_column(path, column, _open_csv(path, file).schema.names)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: its first line is no valid UTF-8{narrow_hint(path, error.object)}") from error
    with pyarrow.OSFile(path) as file:
        at, size = 0, file.size()
        for batch in _open_csv(path, file, include_columns=[column], column_types={column: pyarrow.binary()}):
            yield at, batch[column], file.tell() / size
            at += len(batch)


def _open_csv(path, file, **columns):
    from pyarrow import CompressedInputStream, csv

    stem, suffix = os.path.splitext(path.lower())
    compression = {".gz": "gzip", ".zst": "zstd"}.get(suffix)
    delimiter = "\t" if (stem if compression else path.lower()).endswith(".tsv") else ","
    return csv.open_csv(CompressedInputStream(file, compression) if compression else file,
                        csv.ReadOptions(use_threads=False, block_size=CSV_RECORD),
                        csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                        csv.ConvertOptions(check_utf8=False, **columns))


def path_to(name, column, schema):
    """The names that lead to a column: document.text is the field text of document. Raises UserError without it."""
    if column in schema.names:
        return [column]
    first, _, rest = column.partition(".")
    check_column(name, first if rest else column, schema.names)
    fields = schema.field(first).type
    if not hasattr(fields, "fields"):
        raise UserError(f"{name}: column {first!r} is {fields}, without a field {rest!r}")
    import pyarrow

    return [first, *path_to(f"{name}: {first!r}", rest, pyarrow.schema(fields))]


def at_path(batch, steps):
    """The array there, null where one of the structs around it is."""
    from pyarrow.compute import struct_field

    return struct_field(batch[steps[0]], steps[1:]) if steps[1:] else batch[steps[0]]


def places_to_cut(path, kind, column):
    """(row, share of the file before it) where a parquet file's row groups or an Arrow file's batches begin."""
    import pyarrow.parquet

    row, before = 0, 0.0
    if kind == "arrow":
        for row, _, done in arrow_arrays(path, column, 0):
            yield row, before
            before = done
        return
    metadata = pyarrow.parquet.ParquetFile(path).metadata
    for number in range(metadata.num_row_groups):
        yield row, row / metadata.num_rows
        row += metadata.row_group(number).num_rows


ARRAYS = {"parquet": parquet_arrays, "arrow": arrow_arrays, "csv": csv_arrays}


def values(name, column, record, array):
    """An Arrow array as a list of bytes (text), arrays of token ids, or None. Raises UserError for another type."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_null(array.type) or types.is_binary(array.type) or types.is_large_binary(array.type):
        return array.to_pylist()
    if types.is_string(array.type) or types.is_large_string(array.type):
        return array.cast(pyarrow.large_binary()).to_pylist()  # as bytes: a worker decodes, and knows where it fails
    if hasattr(array.type, "value_type") and types.is_integer(array.type.value_type):
        rows = [row.values for row in array]
        return [None if row is None else token_ids(name, column, number, row.to_numpy(zero_copy_only=False))
                for number, row in enumerate(rows, record)]
    raise UserError(f"{name}: column {column!r} is {array.type}, not text or token ids; name another --text_column")
