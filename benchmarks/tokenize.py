"""Compares tokens per CPU second of get_dataset.py with `tokenizers` alone, on the same text, tokenizer and cores.

    python -m benchmarks.tokenize [--megabytes=16] [--rounds=3]

Theirs is Tokenizer.encode_batch over all documents in memory; ours is the whole of make_dataset: reading the files,
encoding, writing the store. They take turns.
"""

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import command_line, in_turn, table, times_as_fast
from mamba_fsdp.data import tokenizer as tokenizers_
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.importing.inputs import builtin_files
from mamba_fsdp.importing.make_dataset import make_dataset
from mamba_fsdp.settings.dataset_config import DatasetConfig

THEIRS = "tokenizers, encode_batch"


def copy_corpus(folder: Path, size: int) -> Iterator[str]:
    """Puts the first files of the built-in corpus into a folder, as text, and yields their texts."""
    folder.mkdir()
    for number, path in enumerate(builtin_files()):
        text = path.read_bytes().decode()
        (folder / f"{number:05d}.txt").write_bytes(text.encode())
        yield text
        size -= len(text)
        if size < 0:
            return


def compare(folder: Path, megabytes: int, rounds: int) -> str:
    """Returns a table."""
    documents = list(copy_corpus(folder / "in", megabytes << 20))
    trained = tokenizers_.train(documents, 4096)
    trained.save(folder / "tokenizer")
    options = DatasetConfig(tokenizer=str(folder / "tokenizer"), validation_fraction=0)

    def theirs() -> float:
        began = time.process_time()
        trained.backend.encode_batch(documents, add_special_tokens=False)
        return time.process_time() - began

    def ours() -> float:
        store = tempfile.mkdtemp(dir=folder)
        began = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            make_dataset(str(folder / "in"), Path(store, "tokens"), options)
        return time.process_time() - began

    seconds = in_turn({THEIRS: theirs, "get_dataset.py": ours}, rounds)
    store = next(folder.glob("*/tokens/train"))
    tokens = TokenStore(store).token_count
    rows = []
    for name in seconds:
        row = {
            "program": name,
            "tokens / CPU s": f"{tokens / statistics.median(seconds[name]):,.0f}",
        }
        row["x tokenizers"] = f"{times_as_fast(seconds[name], seconds[THEIRS]):.2f}"
        rows.append(row)
    return table(rows)


def main() -> None:
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--megabytes", type=int, default=16)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(compare(Path(folder), given.megabytes, given.rounds))


if __name__ == "__main__":
    main()
