"""Compares tokens per second of get_dataset.py with `tokenizers` alone, on the same text, tokenizer and cores.

    python -m benchmarks.tokenize [--megabytes=16] [--repeats=3]

Theirs is Tokenizer.encode_batch over all documents in memory; ours is the whole of make_dataset: reading the files,
encoding, writing the store. They take turns; on a shared machine, only the median of the pairs' ratios counts.
"""

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
from pathlib import Path

from mamba_fsdp.data import tokenizer as tokenizers_
from mamba_fsdp.data.corpus import builtin_files
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.data.tokenize import make_dataset
from mamba_fsdp.settings.dataset_config import DatasetConfig


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        compare(Path(name), arguments)


def compare(folder, arguments):
    documents = copy_corpus(folder / "in", arguments.megabytes << 20)
    trained = tokenizers_.train(documents, 4096)
    trained.save(folder / "tokenizer")
    options = DatasetConfig(tokenizer=str(folder / "tokenizer"), validation_fraction=0)
    theirs = []
    ours = []
    for repeat in range(arguments.repeats):
        with timed(theirs):
            trained.backend.encode_batch(documents, add_special_tokens=False)
        with timed(ours), contextlib.redirect_stdout(io.StringIO()):
            make_dataset(str(folder / "in"), folder / str(repeat), options)
    tokens = TokenStore(folder / "0" / "train").token_count
    cores = len(os.sched_getaffinity(0))
    print(
        f"{tokens:,} tokens in {len(documents):,} documents, {cores} cores, median of {len(ours)}"
    )
    for clock, name in enumerate(("time", "CPU time")):
        ratios = [other[clock] / own[clock] for other, own in zip(theirs, ours)]
        for title, seconds in (("tokenizers, encode_batch", theirs), ("get_dataset.py", ours)):
            rate = tokens / statistics.median(each[clock] for each in seconds)
            print(f"{title:26} {rate:12,.0f} tokens/s of {name}")
        print(f"{'get_dataset.py / tokenizers':26} {statistics.median(ratios):11.0%} of {name}")


@contextlib.contextmanager
def timed(found):
    """Appends (seconds, CPU seconds of all threads) of the block."""
    began = (time.perf_counter(), time.process_time())
    yield
    found.append((time.perf_counter() - began[0], time.process_time() - began[1]))


def copy_corpus(folder, size):
    """Puts the first files of the built-in corpus into a folder, as text; returns their texts."""
    folder.mkdir()
    documents = []
    for number, path in enumerate(builtin_files()):
        text = path.read_bytes().decode()
        (folder / f"{number:05d}.txt").write_bytes(text.encode())
        documents.append(text)
        size -= len(text)
        if size < 0:
            break
    return documents


if __name__ == "__main__":
    main()
