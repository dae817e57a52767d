"""Documents in other projects' formats, written by the libraries that own them."""

import struct
from pathlib import Path

import datasets
import numpy as np
import pyarrow

datasets.disable_progress_bars()


def write_fms(path, documents, *, column="tokens", stream=False):
    """An Arrow file as fms-fsdp reads it: each record batch one document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pyarrow.schema([(column, pyarrow.uint32())])
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as file, new(file, schema) as writer:
        for document in documents:
            writer.write(
                pyarrow.record_batch([pyarrow.array(document, pyarrow.uint32())], schema=schema)
            )


def write_rows(path, rows, *, shards=1, **columns):
    """A folder that `datasets` saved."""
    datasets.Dataset.from_dict({"input_ids": rows, **columns}).save_to_disk(path, num_shards=shards)


def write_megatron(prefix, documents, *, code=8, sequences_of=lambda document: [document]):
    """PREFIX.bin and PREFIX.idx; sequences_of cuts a document into the sequences that it is made of."""
    dtype = {4: "<i4", 8: "<u2"}[code]
    cut = [[np.array(part, dtype) for part in sequences_of(document)] for document in documents]
    parts = [part for document in cut for part in document]
    lengths = np.array([len(part) for part in parts], "<i4")
    places = np.concatenate([[0], np.cumsum(lengths[:-1] * np.dtype(dtype).itemsize)])[
        : len(parts)
    ].astype("<i8")
    bounds = np.cumsum([0, *map(len, cut)]).astype("<i8")
    Path(f"{prefix}.bin").write_bytes(b"".join(part.tobytes() for part in parts))
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(parts), len(bounds))
    Path(f"{prefix}.idx").write_bytes(
        header + lengths.tobytes() + places.tobytes() + bounds.tobytes()
    )


def write_nanogpt(path, tokens, header=()):
    """A flat file of uint16, behind a header of int32 as llm.c writes it."""
    path.write_bytes(np.array(header, "<i4").tobytes() + np.array(tokens, "<u2").tobytes())


def write_layout(path, documents, counted=lambda token: True):
    """A DataLayout file and its size."""
    values = [
        token | position << 16 | counted(token) << 30
        for document in documents
        for position, token in enumerate(document)
    ]
    path.write_bytes(np.array(values, "<i4").tobytes())
    Path(f"{path}.size").write_text(str(len(values)))


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
