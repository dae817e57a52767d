"""The loader by itself: tokens/s from a warm page cache into batches, memory against the store's size, time to start
anywhere.

    python -m benchmarks.loader [--seq_length 2048] [--batch_size 8]
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from config.train_config import DataConfig
from mamba_fsdp.data.loader import Loader, Split
from mamba_fsdp.data.order import Order
from mamba_fsdp.data.store import StoreWriter, TokenStore

SIZES = {"50 MB": 25_000_000, "1 GB": 500_000_000}  # tokens of two bytes
DOCUMENT = 1000
SECONDS = 3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq_length", type=int, default=2048)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)  # measure this one, in a process of its own
    parser.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--documents", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.store:
        return measure(**vars(arguments))

    print(f"windows of {arguments.seq_length} tokens, {arguments.batch_size} a batch; warm page cache")
    print("store    workers  document index   tokens/s   own memory   mapped pages   first batch at start, middle, end")
    with tempfile.TemporaryDirectory() as folder:
        for size, tokens in SIZES.items():
            store = Path(folder, size.replace(" ", ""))
            write_store(store, tokens)
            for workers, documents in ((1, False), (2, False), (1, True)):
                print(f"{size:8} {workers:7}  {'yes' if documents else 'no':14}", end=" ", flush=True)
                command = [sys.executable, "-m", "benchmarks.loader", f"--store={store}", f"--workers={workers}",
                           f"--seq_length={arguments.seq_length}", f"--batch_size={arguments.batch_size}"]
                subprocess.run(command + ["--documents"] * documents, check=True)


def write_store(path, tokens):
    writer = StoreWriter(path, vocab_size=50000, eos=0, tokenizer={})
    chunk = np.random.default_rng(0).integers(1, 50000, 1_000_000, dtype=np.uint16)
    chunk[DOCUMENT - 1 :: DOCUMENT] = 0
    for _ in range(tokens // len(chunk)):
        writer.append(chunk)
    writer.finish()


def measure(store, workers, documents, seq_length, batch_size):
    for path in store.glob("*.bin"):
        path.read_bytes()  # into the page cache
    sources = {"store": TokenStore(store)}
    order = Order(sources, {"store": 1.0}, seq_length, seed=0)
    steps = int(order.windows[0]) // batch_size

    def loader(sources, order, **given):
        data = DataConfig(seq_length=seq_length, reset_at_documents=documents, **given)
        return Loader(sources, order, data, Split(0, 1, batch_size), vocab_size=50000)

    first = []
    for step in (0, steps // 2, steps - 1):
        start = time.perf_counter()
        state = order.state_after(step * batch_size)
        fresh = {"store": TokenStore(store)}
        with loader(fresh, Order(fresh, {"store": 1.0}, seq_length, seed=0, state=state), num_workers=0) as one:
            one.step(0)
        first.append((time.perf_counter() - start) * 1000)

    with loader(sources, order, num_workers=workers, prefetch=2 * workers) as ahead:
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < SECONDS:
            ahead.step(done)
            done += 1
        rate = done * batch_size * seq_length / (time.perf_counter() - start)
    memory = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    own, mapped = (int(memory[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile"))
    print(f"{rate / 1e6:8.1f} M   {own:7.0f} MB   {mapped:9.0f} MB   {', '.join(f'{ms:.1f} ms' for ms in first)}")


if __name__ == "__main__":
    main()
