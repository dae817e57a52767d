"""Tokens per second and core of get_dataset.py's worker, beside the `tokenizers` library's own on the same text.

    python -m benchmarks.tokenize [--megabytes=16] [--repeats=3]

Both sides run in one process with one thread, in turn, on the built-in corpus with a tokenizer of 4096 tokens trained
on it. Theirs is the better of `encode_batch` and `encode_batch_fast` over all documents, without reading the ids out of
its result; ours goes from the bytes of the input to the array that the stores are written from. The last line is the
whole command with one worker, from the process's CPU time: reading, splitting, writing and the transfers between
processes included.

    python -m benchmarks.tokenize --parts=1,2,4

Tokens per second of wall time of so many parts at once (`get_dataset.py --part=I/N`, together one worker per core),
beside one process of the library per core, each with its share of the same documents; imports are not counted.
"""

import argparse
import contextlib
import multiprocessing
import os
import resource
import tempfile
import time
from pathlib import Path

os.environ["RAYON_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"] = "1", "false"

from config.dataset_config import DatasetConfig  # noqa: E402 (the thread count has to be set before)
from mamba_fsdp.data import text, tokenize, tokenizer, workers  # noqa: E402
from mamba_fsdp.data.store import TokenStore  # noqa: E402


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", type=lambda text: list(map(int, text.split(","))), default=[])
    arguments = parser.parse_args()

    files, size = [], 0
    for path in text.corpus_files():
        files.append((str(path), "text"))
        size += path.stat().st_size
        if size > arguments.megabytes << 20:
            break
    source = open_files(files, DatasetConfig())
    documents = [Path(path).read_bytes().decode() for path, _ in files]
    trained = tokenizer.train(documents, 4096)
    if arguments.parts:
        compare_parts(files, documents, trained, arguments)
        return
    chunks = list(workers._chunks(source.blocks()))
    workers._worker = trained.backend, trained.eos, None, trained.vocab_size, source.options

    best = {
        "tokenizers, encode_batch": 0,
        "tokenizers, encode_batch_fast": 0,
        "get_dataset.py, worker": 0,
    }
    tokens = sum(len(tokens) for tokens, _ in map(workers._tokenize, chunks))
    for _ in range(arguments.repeats):
        for name, run in zip(
            best,
            (
                lambda: trained.backend.encode_batch(documents, add_special_tokens=False),
                lambda: trained.backend.encode_batch_fast(documents, add_special_tokens=False),
                lambda: [workers._tokenize(chunk) for chunk in chunks],
            ),
        ):
            started = time.process_time()
            run()
            best[name] = max(best[name], tokens / (time.process_time() - started))
    best["get_dataset.py, whole command"] = whole_command(files, trained, arguments.repeats)
    theirs = max(rate for name, rate in best.items() if name.startswith("tokenizers"))
    print(
        f"{size / 1e6:.1f} MB in {len(documents)} documents, {tokens:,} tokens; "
        f"CPU time, best of {arguments.repeats}"
    )
    for name, rate in best.items():
        print(
            f"{name:32} {rate:12,.0f} tokens/s per core {rate / theirs:6.1%} of the library's best"
        )


def open_files(files, options):
    return text.TextSource({"train": text.Files(files, [], options)}, options)


def compare_parts(files, documents, trained, arguments):
    cores, shares = len(os.sched_getaffinity(0)), {}
    with tempfile.TemporaryDirectory() as folder:
        trained.save(Path(folder, "tokenizer"))
        common = files, f"{folder}/tokenizer/tokenizer.json", trained.eos_token
        best = {
            "one process of tokenizers per core": 0.0,
            **{f"{parts} at once": 0.0 for parts in arguments.parts},
        }
        for repeat in range(arguments.repeats):
            shares = [(encode, documents[core::cores], *common[1:]) for core in range(cores)]
            seconds = {"one process of tokenizers per core": at_once(shares)}
            for parts in arguments.parts:
                out = f"{folder}/{repeat}-{parts}"
                seconds[f"{parts} at once"] = at_once(
                    [
                        (tokenise_part, out, f"{part}/{parts}", max(1, cores // parts), *common)
                        for part in range(parts)
                    ]
                )
                tokens = sum(
                    TokenStore(f"{out}/{name}").token_count for name in ("train", "validation")
                )
            best = {name: max(rate, tokens / seconds[name]) for name, rate in best.items()}
    theirs = next(iter(best.values()))
    print(
        f"{len(documents)} documents, {tokens:,} tokens, {cores} cores; wall time, best of {arguments.repeats}"
    )
    for name, rate in best.items():
        print(f"{name:36} {rate:12,.0f} tokens/s {rate / theirs:6.1%} of the library")


def at_once(jobs):
    """Seconds that jobs, each (function, arguments...), take in processes of their own, from when all have imported."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(jobs) + 1)
    processes = [context.Process(target=after_barrier, args=(barrier, *job)) for job in jobs]
    for process in processes:
        process.start()
    barrier.wait()
    started = time.monotonic()
    for process in processes:
        process.join()
    assert not any(process.exitcode for process in processes)
    return time.monotonic() - started


def after_barrier(barrier, function, *words):
    barrier.wait()
    function(*words)


def encode(documents, path, _):
    backend = tokenizer.Tokenizer.from_file(path)
    for begin in range(0, len(documents), 64):
        backend.encode_batch_fast(documents[begin : begin + 64], add_special_tokens=False)


def tokenise_part(out, part, workers_of_each, files, path, eos_token):
    text.UNIT_BYTES = 1 << 23  # for some to share
    options = DatasetConfig(tokenizer=path, eos_token=eos_token, workers=workers_of_each, part=part)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        tokenize.make_dataset(open_files(files, options), out)


def whole_command(files, trained, repeats):
    """Tokens per second of CPU time of this process and its worker together."""
    rates = []
    with tempfile.TemporaryDirectory() as folder:
        trained.save(Path(folder, "tokenizer"))
        options = DatasetConfig(
            tokenizer=f"{folder}/tokenizer/tokenizer.json", eos_token=trained.eos_token, workers=1
        )
        for repeat in range(repeats):
            before = cpu_seconds()
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                tokenize.make_dataset(open_files(files, options), f"{folder}/{repeat}")
            rates.append(
                sum(
                    TokenStore(f"{folder}/{repeat}/{name}").token_count
                    for name in ("train", "validation")
                )
                / (cpu_seconds() - before)
            )
    return max(rates)


def cpu_seconds():
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
