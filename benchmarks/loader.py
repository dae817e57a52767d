"""The loader over every format beside other loaders of the same tokens, from a warm page cache; starting anywhere; a
store of 10^12 tokens; what is read of a cold one.

    python -m benchmarks.loader [--seq_length 2048] [--batch_size 8] [--tokens 20000000] [--rounds 3]

The others: torch.utils.data.DataLoader with a DistributedSampler over a folder of `datasets`, MosaicML's
StreamingDataset, shuffled (mosaicml-streaming), and Megatron's IndexedDataset (megatron-core); who is not installed is
left out, with a line. All give batches of int64 tensors; each takes its turn for a second, round by round.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mamba_fsdp.data.store import StoreWriter, TokenStore, _checksum
from mamba_fsdp.formats import TOKEN_STORE

VOCABULARY, EOS, DOCUMENT = 50000, 0, 1000
SECONDS = 1.0  # of a loader's turn
FAR = 1_000_000  # the step that a run resumes at


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq_length", type=int, default=2048)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--huge", type=Path, help=argparse.SUPPRESS
    )  # open and seek in this one, in an own process
    parser.add_argument(
        "--cold", nargs=3, help=argparse.SUPPRESS
    )  # STORE RANK RANKS: read it, say how many bytes
    arguments = parser.parse_args()
    if arguments.huge:
        return seek(arguments.huge, arguments.seq_length)
    if arguments.cold:
        return read_cold(*arguments.cold, arguments.seq_length)
    with tempfile.TemporaryDirectory() as folder:
        compare(
            Path(folder),
            **{
                name: vars(arguments)[name]
                for name in ("seq_length", "batch_size", "tokens", "rounds")
            },
        )
        sparse = write_sparse(Path(folder, "sparse"))
        subprocess.run([sys.executable, "-m", "benchmarks.loader", f"--huge={sparse}"], check=True)
        size, read = cold_bytes(Path(folder, "store"), ranks=2)
        print(
            f"2 processes over one cold store of {size / 1e6:.1f} MB read {read / 1e6:.1f} MB from the disk "
            f"({read / size:.3f} of it)"
        )


def compare(folder, seq_length, batch_size, tokens, rounds):
    write_store(folder / "store", tokens)
    ours, others = make_ours(folder, seq_length, batch_size), {}
    for make in (data_loaders, mosaic, megatron):
        try:
            others |= make(folder, seq_length, batch_size)
        except ImportError as error:
            print(f"left out: {make.__name__} ({error})")
    loaders = {name: iter(loader) for name, loader in {**ours, **others}.items()}
    rates, of_cpu = ({name: [] for name in loaders} for _ in range(2))
    for name in loaders:  # caches, worker processes
        next(loaders[name])
    for _ in range(rounds):
        for name, batches in loaders.items():
            began, cpu, done = time.perf_counter(), time.process_time(), 0
            while time.perf_counter() - began < SECONDS:
                assert next(batches).shape == (batch_size, seq_length)
                done += batch_size * seq_length
            rates[name].append(done / (time.perf_counter() - began))
            of_cpu[name].append(done / (time.process_time() - cpu))
    print(
        f"windows of {seq_length} tokens, {batch_size} a batch, {tokens:,} tokens, warm page cache; median of "
        f"{rounds}; load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    print(f"{'loader':45} M tokens/s  x DataLoader  x best other   M tokens per CPU second")
    median = {name: statistics.median(values) for name, values in rates.items()}
    slow = max(rate for name, rate in median.items() if name.startswith("DataLoader"))
    best = max((median[name] for name in others), default=slow)
    for name, rate in median.items():
        here = "worker" not in name or name.endswith(
            " 0 workers"
        )  # what other processes take is not counted
        cpu = f"{statistics.median(of_cpu[name]) / 1e6:14.2f}" if here else ""
        print(f"{name:45} {rate / 1e6:10.2f} {rate / slow:13.1f} {rate / best:13.2f} {cpu}")
    resume(folder / "store", seq_length, batch_size)


def write_store(path, tokens):
    writer = StoreWriter(path, vocab_size=VOCABULARY, eos=EOS, tokenizer="")
    chunk = np.random.default_rng(0).integers(1, VOCABULARY, 1_000_000, dtype=np.uint16)
    chunk[DOCUMENT - 1 :: DOCUMENT] = EOS
    for _ in range(tokens // len(chunk)):
        writer.append(chunk)
    writer.finish()


def make_ours(folder, seq_length, batch_size):
    """{name: batches} of our loader; and folder/blocks, which the others read."""
    import datasets

    from config.train_config import DataConfig
    from mamba_fsdp.data.loader import BatchLayout, Loader
    from mamba_fsdp.data.opening import open_source
    from mamba_fsdp.data.sampler import Sampler

    def batches(path, workers):
        data = DataConfig(seq_length=seq_length, num_workers=workers)
        sources = {"it": open_source(path, data)}
        order = Sampler(sources, {"it": 1.0}, seq_length, seed=0)
        with Loader(
            sources, order, data, BatchLayout(0, 1, batch_size), vocab_size=VOCABULARY
        ) as loader:
            for step in itertools.count():
                yield loader.step(step)[0].tokens

    store = TokenStore(folder / "store")
    rows = store.read(0, store.token_count // seq_length * seq_length).tokens
    datasets.Dataset.from_dict({"input_ids": rows.reshape(-1, seq_length)}).save_to_disk(
        folder / "blocks"
    )
    return {
        "ours, token store": batches(folder / "store", 1),
        "ours, token store, without a thread": batches(folder / "store", 0),
    }


def data_loaders(folder, seq_length, batch_size):
    import datasets
    from torch.utils.data import DataLoader, DistributedSampler
    from transformers import default_data_collator

    lists = datasets.load_from_disk(str(folder / "blocks"))
    tensors = lists.with_format("torch")

    def batches(rows, workers, collate=None):
        sampler = DistributedSampler(rows, num_replicas=1, rank=0)
        loader = DataLoader(
            rows,
            batch_size,
            sampler=sampler,
            num_workers=workers,
            drop_last=True,
            persistent_workers=workers > 0,
            collate_fn=collate,
        )
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            for batch in loader:
                yield batch["input_ids"]

    # As transformers' Trainer feeds a model, and the fastest there is: rows that are tensors already.
    return {
        f"DataLoader, default_data_collator, {workers} workers": batches(
            lists, workers, default_data_collator
        )
        for workers in (0, 2)
    } | {
        f"DataLoader, format torch, {workers} workers": batches(tensors, workers)
        for workers in (0, 1, 2)
    }


def mosaic(folder, seq_length, batch_size):
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    tokens = TokenStore(folder / "store").read(0, TokenStore(folder / "store").token_count).tokens
    with MDSWriter(
        out=str(folder / "mds"), columns={"tokens": f"ndarray:int32:{seq_length}"}
    ) as writer:
        for start in range(0, len(tokens) - seq_length, seq_length):
            writer.write({"tokens": tokens[start : start + seq_length].astype(np.int32)})

    class Rows(StreamingDataset):
        def __getitem__(self, at):
            return super().__getitem__(at)["tokens"].astype(np.int64)

    def batches(workers):
        loader = DataLoader(
            Rows(local=str(folder / "mds"), shuffle=True, batch_size=batch_size),
            batch_size,
            num_workers=workers,
            drop_last=True,
        )
        while True:
            yield from loader

    return {
        "StreamingDataset, 1 worker": batches(1)
    }  # one at a time: several share its shared memory's names


def megatron(folder, seq_length, batch_size):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
    from torch.utils.data import DataLoader, Dataset, DistributedSampler

    tokens = TokenStore(folder / "store").read(0, TokenStore(folder / "store").token_count).tokens
    builder = IndexedDatasetBuilder(str(folder / "megatron.bin"), dtype=np.uint16)
    for start in range(
        0, len(tokens) - seq_length, seq_length
    ):  # its fastest use: a sample is a sequence
        sample = tokens[start : start + seq_length + 1]
        builder.add_document(torch.from_numpy(sample.astype(np.int32)), [len(sample)])
    builder.finalize(str(folder / "megatron.idx"))

    class Rows(Dataset):
        def __init__(self):
            self.indexed = IndexedDataset(str(folder / "megatron"), mmap=True)

        def __len__(self):
            return len(self.indexed)

        def __getitem__(self, at):
            sample = torch.from_numpy(self.indexed[at].astype(np.int64))
            return sample[:-1].contiguous(), sample[
                1:
            ].contiguous()  # tokens and labels, as GPTDataset has them

    def batches(workers):
        rows = Rows()
        sampler = DistributedSampler(rows, num_replicas=1, rank=0)
        loader = DataLoader(
            rows,
            batch_size,
            sampler=sampler,
            num_workers=workers,
            drop_last=True,
            persistent_workers=workers > 0,
        )
        while True:
            yield from (tokens for tokens, _ in loader)

    return {f"IndexedDataset, {workers} workers": batches(workers) for workers in (0, 1)}


def resume(store, seq_length, batch_size):
    from config.train_config import DataConfig
    from mamba_fsdp.data.loader import BatchLayout, Loader
    from mamba_fsdp.data.sampler import Sampler

    sources = {"it": TokenStore(store)}
    state = Sampler(sources, {"it": 1.0}, seq_length, seed=0).state_after(FAR * batch_size)
    began = time.perf_counter()
    sources = {"it": TokenStore(store)}
    data = DataConfig(seq_length=seq_length)
    order = Sampler(sources, {"it": 1.0}, seq_length, seed=0, state=state)
    with Loader(
        sources, order, data, BatchLayout(0, 1, batch_size), vocab_size=VOCABULARY, first_step=FAR
    ) as loader:
        loader.step(FAR)
        print(
            f"resuming at step {FAR:,}: first batch after {(time.perf_counter() - began) * 1000:.1f} ms"
        )


def write_sparse(path, shards=1000, tokens=10**9, documents=10**6):
    """A store of shards * tokens tokens, all of them 0, that takes no room on the disk."""
    path.mkdir()
    entries = [
        {
            "name": f"{number:05d}",
            "tokens": tokens,
            "documents": documents,
            "bin_sha256": "",
            "doc_sha256": "",
        }
        for number in range(shards)
    ]
    for entry in entries:
        for suffix, size in (("bin", 2 * tokens), ("doc", 8 * documents)):
            with open(path / f"{entry['name']}.{suffix}", "wb") as file:
                file.truncate(size)
    index = {
        **TOKEN_STORE.header(),
        "dtype": "uint16",
        "vocab_size": VOCABULARY,
        "eos": EOS,
        "tokenizer": "",
        "shards": entries,
    }
    (path / "index.json").write_text(json.dumps({**index, "checksum": _checksum(index)}))
    return path


def seek(path, seq_length, seeks=1000):
    """Print how long it takes to open a store and to read windows anywhere in it, in the order of training."""
    from mamba_fsdp.data.sampler import Sampler

    began = time.perf_counter()
    store = TokenStore(path)
    opened = time.perf_counter() - began
    order = Sampler({"it": store}, {"it": 1.0}, seq_length, seed=0)
    far = int(order.windows[0])
    times = []
    for sample in np.random.default_rng(0).integers(0, far, seeks):
        began = time.perf_counter()
        window = int(order.samples(int(sample), 1)[1][0])
        store.read(window * seq_length, seq_length + 1)
        times.append(time.perf_counter() - began)
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    print(
        f"a sparse store of {store.token_count:.0e} tokens: open after {opened * 1000:.0f} ms; {seeks} windows "
        f"anywhere in {statistics.median(times) * 1000:.2f} ms each, the slowest {max(times) * 1000:.2f} ms; peak "
        f"memory {int(status['VmHWM'].split()[0]) / 1024:.0f} MiB"
    )


def cold_bytes(store, ranks, seq_length=2048):
    """(bytes of the store's tokens, bytes that `ranks` processes together had read from the disk for an epoch)."""
    files = sorted(store.glob("*.bin"))
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.loader",
                f"--seq_length={seq_length}",
                "--cold",
                str(store),
                str(rank),
                str(ranks),
            ],
            stdout=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    return sum(path.stat().st_size for path in files), sum(
        int(one.communicate()[0]) for one in started
    )


def read_cold(store, rank, ranks, seq_length):
    """Read this rank's windows of an epoch; print the bytes that the kernel fetched for it."""
    from mamba_fsdp.data.sampler import Sampler

    source, batch = TokenStore(store), 8
    order = Sampler({"it": source}, {"it": 1.0}, seq_length, seed=0)
    before = fetched()
    for first in range(int(rank) * batch, int(order.windows[0]), int(ranks) * batch):
        for window in order.samples(first, min(batch, int(order.windows[0]) - first))[1].tolist():
            source.read(
                window * seq_length, min(seq_length + 1, source.token_count - window * seq_length)
            )[0].max()
    print(fetched() - before)


def fetched():
    return int(Path("/proc/self/io").read_text().partition("read_bytes: ")[2].split()[0])


if __name__ == "__main__":
    main()
