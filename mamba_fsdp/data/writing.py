"""Sources written out in any format, for other programs: read from their start to their end, a piece at a time."""

import csv
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from config.dataset_config import DatasetConfig
from mamba_fsdp.data.readers import grouped
from mamba_fsdp.data.source import Source
from mamba_fsdp.data.store import StoreWriter
from mamba_fsdp.errors import UserError

PIECE = 1 << 20  # tokens that are read at a time
LAST_POSITION = (1 << 14) - 1  # that DataLayout has bits for


@dataclass
class Copy:
    """One source on its way into `folder`. block: tokens of a row of save_to_disk; 0: each document is one. told: what
    is not the same there, {what: how often}."""

    source: Source
    folder: Path
    block: int = 0
    shard_tokens: int = DatasetConfig.shard_tokens
    show: Callable[[str], None] = lambda text: None
    told: dict[str, int] = field(default_factory=dict)

    def pieces(
        self, block: int = 1, masked: bool = False
    ) -> Iterator[tuple[np.ndarray, np.ndarray, Any]]:
        """Yields (tokens, positions, mask), as the source has them, of stretches of about PIECE tokens, a multiple of
        `block`. Raises UserError where other than first tokens of documents don't count, unless the mask goes along."""
        source, most = self.source, -(-PIECE // block) * block
        for start in range(0, source.token_count, most):
            tokens, positions, mask = source.read(start, min(most, source.token_count - start))
            if mask is not None and not masked:
                self.tell(
                    "first tokens of documents did not count in the loss",
                    (~mask & (positions == 0)).sum(),
                )
                if not mask[positions != 0].all():
                    raise UserError(
                        f"{source.path} says of some tokens that they don't count in the loss, for which "
                        "this format has no place; write --format=datalayout"
                    )
            yield tokens, positions, mask
            self.show(f"{source.path}: {start:,} of {source.token_count:,} tokens")

    def documents(self) -> Iterator[np.ndarray]:
        """Yields the tokens of each document, with the eos that ends it."""
        parts: list[np.ndarray] = []
        for tokens, positions, _ in self.pieces():
            bounds = [0, *np.flatnonzero(positions == 0).tolist(), len(tokens)]
            for start, stop in zip(bounds, bounds[1:]):
                if start < stop:
                    if positions[start] == 0 and parts:
                        yield np.concatenate(parts)
                        parts = []
                    parts.append(tokens[start:stop])
        yield np.concatenate(parts)

    def rows(self) -> Iterator[np.ndarray]:
        """Yields each document, or where there is a `block` as many tokens, at last fewer."""
        if not self.block:
            yield from self.documents()
            return
        for tokens, _, _ in self.pieces(self.block):
            yield from np.split(tokens, range(self.block, len(tokens), self.block))

    def tell(self, what: str, count: int) -> None:
        if count:
            self.told[what] = self.told.get(what, 0) + int(count)


def write_store(copy: Copy, name: str) -> None:
    """A token store. Every document there ends with the one eos, which is added where it is missing."""
    source = copy.source
    vocab_size = source.vocab_size or 1 + max(
        int(tokens.max()) for tokens, _, _ in copy.pieces(masked=True)
    )
    writer = StoreWriter(
        copy.folder,
        vocab_size=max(vocab_size, source.eos + 1),
        eos=source.eos,
        tokenizer=source.tokenizer,
        shard_tokens=copy.shard_tokens,
    )
    last = source.eos
    for tokens, positions, _ in copy.pieces():
        before = np.concatenate([[last], tokens[:-1]])
        unended = np.flatnonzero((positions == 0) & (before != source.eos))
        copy.tell("documents without an eos got one", len(unended))
        copy.tell(
            "documents were cut at an eos inside", ((positions != 0) & (before == source.eos)).sum()
        )
        writer.append(np.insert(tokens.astype(np.int64), unended, source.eos))
        last = int(tokens[-1])
    if last != source.eos:
        copy.tell("documents without an eos got one", 1)
        writer.end_document()
    writer.finish()


def _write_arrow(folder, pattern, schema, new, batches, most):
    """Writes `batches`, each (its one column, documents, tokens), to Arrow files of about `most` tokens. new: of
    pyarrow.ipc, makes the writer of one. Returns [name, documents, tokens] of each file."""
    written: list[list[Any]] = []
    with ExitStack() as opened:
        for column, documents, tokens in batches:
            if not written or written[-1][2] >= most:
                opened.close()
                written.append([pattern.format(len(written)), 0, 0])
                file = opened.enter_context(pyarrow.OSFile(str(folder / written[-1][0]), "wb"))
                writer = opened.enter_context(new(file, schema))
            writer.write(pyarrow.record_batch([column], schema=schema))
            written[-1][1:] = written[-1][1] + documents, written[-1][2] + tokens
    return written


def write_fms(copy: Copy, name: str) -> None:
    """Arrow files as fms-fsdp reads them, in a folder `name`: each record batch a document without its eos, which is
    added there. Beside it meta/counts.csv."""

    def batches():
        for tokens in copy.documents():
            tokens = tokens[:-1] if tokens[-1] == copy.source.eos else tokens
            copy.tell("empty documents were left out", not len(tokens))
            if len(tokens):  # an empty one hides the rest of its file from fms-fsdp
                yield pyarrow.array(tokens.astype(np.uint32)), 1, len(tokens)

    (copy.folder / name).mkdir(exist_ok=True)
    schema = pyarrow.schema([("tokens", pyarrow.uint32())])
    written = _write_arrow(
        copy.folder / name,
        "{:05d}.arrow",
        schema,
        pyarrow.ipc.new_file,
        batches(),
        copy.shard_tokens,
    )
    (copy.folder / "meta").mkdir(exist_ok=True)
    with open(copy.folder / "meta" / "counts.csv", "a", newline="") as table:
        csv.writer(table).writerows(
            [["dataset/filename", "documents", "tokens"]] * (not table.tell())
            + [[f"/{name}/{file}", *counts] for file, *counts in written]
        )


def write_datalayout(copy: Copy, name: str) -> None:
    """A DataLayout file: token, position, whether it counts, see data/foreign/datalayout.py. Raises UserError for
    tokens of more than 16 bits."""
    path = copy.folder / f"{name}.npy"
    with open(path, "xb") as file:
        for tokens, positions, mask in copy.pieces(masked=True):
            if tokens.max() >= 1 << 16:
                raise UserError(
                    f"{copy.source.path} holds the token {tokens.max()}, for which DataLayout's 16 bits do "
                    "not suffice; write another --format"
                )
            copy.tell(
                f"positions from {LAST_POSITION} on are said as that",
                (positions > LAST_POSITION).sum(),
            )
            counts = (
                np.int32(1) if mask is None else (mask | (positions == 0)).astype(np.int32)
            )  # no first one does
            values = (
                tokens.astype(np.int32) | np.minimum(positions, LAST_POSITION) << 16 | counts << 30
            )
            file.write(values.astype("<i4").data)
    Path(f"{path}.size").write_text(str(copy.source.token_count))


def write_save_to_disk(copy: Copy, name: str) -> None:
    """What datasets.load_from_disk opens: rows of input_ids."""
    import datasets

    def batches():
        for rows in grouped(copy.rows(), len, PIECE):
            ends = np.cumsum([0, *map(len, rows)]).astype(np.int32)
            column = pyarrow.ListArray.from_arrays(ends, np.concatenate(rows).astype(np.int32))
            yield column, len(rows), int(ends[-1])

    features = datasets.Features({"input_ids": [datasets.Value("int32")]})
    written = _write_arrow(
        copy.folder,
        "data-{:05d}.arrow",
        features.arrow_schema,
        pyarrow.ipc.new_stream,
        batches(),
        copy.shard_tokens,
    )
    datasets.DatasetInfo(features=features).write_to_directory(str(copy.folder))
    state: dict[str, Any]
    state = {
        "_data_files": [{"filename": file} for file, *_ in written],
        "_fingerprint": copy.source.identity[-16:],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (copy.folder / "state.json").write_text(json.dumps(state, indent=1) + "\n")


WRITERS = {
    "store": write_store,
    "fms": write_fms,
    "datalayout": write_datalayout,
    "save_to_disk": write_save_to_disk,
}


def copy_tokenizer(source: Source, folder: Path) -> None:
    """To folder/tokenizer, where the source came with one."""
    with suppress(UserError):
        if source.tokenizer_path.is_dir():
            shutil.copytree(source.tokenizer_path, folder / "tokenizer", dirs_exist_ok=True)
