"""Documents in other projects' formats, written by the libraries that own them."""

import datasets
import pyarrow

datasets.disable_progress_bars()


def write_fms(path, documents, *, column="tokens", stream=False):
    """An Arrow file as fms-fsdp reads it: each record batch one document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pyarrow.schema([(column, pyarrow.uint32())])
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as file, new(file, schema) as writer:
        for document in documents:
            writer.write(pyarrow.record_batch([pyarrow.array(document, pyarrow.uint32())], schema=schema))


def write_rows(path, rows, *, shards=1, **columns):
    """A folder that `datasets` saved."""
    datasets.Dataset.from_dict({"input_ids": rows, **columns}).save_to_disk(path, num_shards=shards)


def laid_end_to_end(documents, eos, bos=None, strip=()):
    """(tokens, positions) of what is to be read, by the words of docs/data.md."""
    tokens, positions = [], []
    for document in documents:
        document, ends = list(document), {eos, bos, *strip}
        while document and document[0] in ends:
            document = document[1:]
        while document and document[-1] in ends:
            document = document[:-1]
        if document:
            document = [bos] * (bos is not None) + document + [eos]
            tokens += document
            positions += range(len(document))
    return tokens, positions
