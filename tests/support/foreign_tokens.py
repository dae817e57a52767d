"""Writes files of token ids in the formats of other programs."""

import numpy as np
import pyarrow


def write_fms(path, documents, column="tokens"):
    """Writes an Arrow file in the format of fms-fsdp: a record batch of plain integers for each document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pyarrow.schema([(column, pyarrow.uint32())])
    with pyarrow.ipc.new_file(str(path), schema) as writer:
        for document in documents:
            writer.write_batch(
                pyarrow.record_batch([pyarrow.array(document, pyarrow.uint32())], schema)
            )


def write_layout(path, documents, wraps=True, counts=True):
    """Writes a DataLayout file, and its number of tokens to FILE.size. Each token is stored with its position in the
    document.

    wraps: whether positions from 16,384 on begin at 0 again, or stay at 16,383. counts: whether each token counts in
    the loss.
    """
    lengths = [len(document) for document in documents]
    positions = np.concatenate([np.arange(length) for length in lengths])
    positions = positions % 16384 if wraps else np.minimum(positions, 16383)
    tokens = np.concatenate(documents).astype(np.int64)
    (tokens | positions << 16 | int(counts) << 30).astype("<i4").tofile(path)
    path.with_name(path.name + ".size").write_text(str(len(tokens)))
