"""Tokens per second and core of get_dataset.py's worker, beside the `tokenizers` library's own on the same text.

    python -m benchmarks.tokenize [--megabytes=16] [--repeats=3]

Both sides run in one process with one thread, in turn, on the built-in corpus with a tokenizer of 4096 tokens trained
on it. Theirs is the better of `encode_batch` and `encode_batch_fast` over all documents, without reading the ids out of
its result; ours goes from the bytes of the input to the array that the stores are written from. The last line is the
whole command with one worker, from the process's CPU time: reading, splitting, writing and the transfers between
processes included.
"""

import argparse
import contextlib
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    files, size = [], 0
    for path in text.corpus_files():
        files.append((str(path), "text"))
        size += path.stat().st_size
        if size > arguments.megabytes << 20:
            break
    source = text.Files(files, DatasetConfig())
    documents = [Path(path).read_bytes().decode() for path, _ in files]
    trained = tokenizer.train(documents, 4096)
    chunks = list(workers._chunks(source.blocks()))
    workers._worker = trained.backend, trained.eos, None, trained.vocab_size, source.options

    best = {"tokenizers, encode_batch": 0, "tokenizers, encode_batch_fast": 0, "get_dataset.py, worker": 0}
    tokens = sum(len(tokens) for tokens, _ in map(workers._tokenize, chunks))
    for _ in range(arguments.repeats):
        for name, run in zip(best, (lambda: trained.backend.encode_batch(documents, add_special_tokens=False),
                                    lambda: trained.backend.encode_batch_fast(documents, add_special_tokens=False),
                                    lambda: [workers._tokenize(chunk) for chunk in chunks])):
            started = time.process_time()
            run()
            best[name] = max(best[name], tokens / (time.process_time() - started))
    best["get_dataset.py, whole command"] = whole_command(source, trained, arguments.repeats)
    theirs = max(rate for name, rate in best.items() if name.startswith("tokenizers"))
    print(f"{size / 1e6:.1f} MB in {len(documents)} documents, {tokens:,} tokens; "
          f"CPU time, best of {arguments.repeats}")
    for name, rate in best.items():
        print(f"{name:32} {rate:12,.0f} tokens/s per core {rate / theirs:6.1%} of the library's best")


def whole_command(source, trained, repeats):
    """Tokens per second of CPU time of this process and its worker together."""
    rates = []
    with tempfile.TemporaryDirectory() as folder:
        trained.save(f"{folder}/tokenizer")
        options = DatasetConfig(tokenizer=f"{folder}/tokenizer/tokenizer.json", eos_token=trained.eos_token, workers=1)
        for repeat in range(repeats):
            before = cpu_seconds()
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                tokenize.make_dataset(text.Files(source.files, options), f"{folder}/{repeat}")
            rates.append(sum(TokenStore(f"{folder}/{repeat}/{name}").token_count for name in ("train", "validation"))
                         / (cpu_seconds() - before))
    return max(rates)


def cpu_seconds():
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
