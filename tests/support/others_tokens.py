"""Tokens as others write them."""

import struct

import numpy as np
import pyarrow


def write_fms(path, documents, column="tokens"):
    """An Arrow file of fms-fsdp's: a record batch of plain integers for each document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pyarrow.schema([(column, pyarrow.uint32())])
    with pyarrow.ipc.new_file(str(path), schema) as writer:
        for document in documents:
            writer.write_batch(
                pyarrow.record_batch([pyarrow.array(document, pyarrow.uint32())], schema)
            )


def write_layout(path, documents, wraps=True, counts=True):
    """A DataLayout file, with FILE.size; positions from 16,384 on wrap, or stay at the highest."""
    lengths = [len(document) for document in documents]
    positions = np.concatenate([np.arange(length) for length in lengths])
    positions = positions % 16384 if wraps else np.minimum(positions, 16383)
    tokens = np.concatenate(documents).astype(np.int64)
    (tokens | positions << 16 | int(counts) << 30).astype("<i4").tofile(path)
    path.with_name(path.name + ".size").write_text(str(len(tokens)))


def write_megatron(path, documents):
    """FILE.bin and FILE.idx, as megatron-core 0.16 writes them, of int32. Each document is two sequences."""
    halves = [half for document in documents for half in (document[:1], document[1:])]
    lengths = np.array([len(half) for half in halves], "<i4")
    offsets = 4 * (np.cumsum(lengths, dtype="<i8") - lengths)
    firsts = np.arange(0, len(halves) + 1, 2)
    np.concatenate(halves).astype("<i4").tofile(path)
    header = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 4, len(lengths), len(firsts))
    index = header + lengths.tobytes() + offsets.tobytes() + firsts.tobytes()
    path.with_suffix(".idx").write_bytes(index)
