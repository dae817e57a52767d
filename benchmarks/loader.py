"""Compares the loader with torch's DataLoader over the same tokens in a folder of `datasets`, from a warm page cache;
then times a start at step 1,000,000.

    python -m benchmarks.loader [--rounds=3]

Both give batches of int64 tensors (8, 2048); each takes its turn for a second, round by round.
"""

import argparse
import statistics
import tempfile
import time
from itertools import count
from pathlib import Path

import datasets
import numpy as np
import torch

from mamba_fsdp.data.loader import BatchShape, Loader
from mamba_fsdp.data.sampler import Sampler
from mamba_fsdp.data.store import StoreWriter, TokenStore
from mamba_fsdp.settings.train_config import DataConfig

VOCABULARY, EOS, DOCUMENT = 50000, 0, 1000
SEQ_LENGTH, BATCH, TOKENS = 2048, 8, 20_000_000
SECONDS = 1.0  # of a loader's turn
FAR = 1_000_000  # the step that a run resumes at


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        store = write_tokens(Path(folder))
        loaders = {
            "the loader, 0 threads": ours(store, 0),
            "the loader, 1 thread": ours(store, 1),
            "DataLoader, 0 workers": theirs(Path(folder, "rows"), 0),
            "DataLoader, 2 workers": theirs(Path(folder, "rows"), 2),
        }
        rates = {name: [] for name in loaders}
        for batches in loaders.values():
            next(batches)  # caches, worker processes
        for _ in range(rounds):
            for name, batches in loaders.items():
                rates[name].append(tokens_per_second(batches))
        for name, values in rates.items():
            print(f"{name:25} {statistics.median(values) / 1e6:8.2f} M tokens/s")
        began = time.perf_counter()
        next(ours(store, 0, FAR))
        print(f"{'the first batch at a step':25} {time.perf_counter() - began:8.4f} s, at {FAR:,}")


def write_tokens(folder):
    """Writes the same tokens as a store, which is returned, and as rows."""
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, TOKENS, dtype=np.uint16)
    tokens[DOCUMENT - 1 :: DOCUMENT] = EOS
    writer = StoreWriter(folder / "store", vocab_size=VOCABULARY, eos=EOS, tokenizer="")
    writer.append(tokens)
    writer.finish()
    rows = tokens[: TOKENS // SEQ_LENGTH * SEQ_LENGTH].reshape(-1, SEQ_LENGTH)
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(folder / "rows")
    return TokenStore(folder / "store")


def ours(store, threads, first_step=0):
    """Yields batches from `first_step` on."""
    data = DataConfig(seq_length=SEQ_LENGTH, num_workers=threads)
    sampler = Sampler({"it": store}, {"it": 1.0}, SEQ_LENGTH, seed=0)
    batch_shape = BatchShape(0, 1, BATCH)
    with Loader({"it": store}, sampler, data, batch_shape, vocab_size=VOCABULARY) as loader:
        for step in count(first_step):
            yield loader.step(step)[0].tokens


def theirs(rows, workers):
    dataset = datasets.load_from_disk(rows).with_format("torch")
    while True:
        loader = torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, num_workers=workers)
        for batch in loader:
            yield batch["input_ids"]


def tokens_per_second(batches):
    began = time.perf_counter()
    done = 0
    while time.perf_counter() - began < SECONDS:
        done += next(batches).numel()
    return done / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
