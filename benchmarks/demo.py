"""The demo's result beside a bigram model: `python -m benchmarks.demo`.

Run after ./1.train.sbatch, or it trains the demo first. The bigram model with back-off (interpolated Kneser-Ney, one
discount from the counts) is estimated on the very tokens that the run has drawn, and both are scored on the same
validation windows.
"""

import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from config import resolve
from mamba_fsdp.conventions import IGNORED_LABEL
from mamba_fsdp.data.loader import BatchLayout, evaluation_batches
from mamba_fsdp.data.sampler import Sampler
from mamba_fsdp.data.selection import training_sources, validation_sources
from mamba_fsdp.report.records import read
from mamba_fsdp.run_layout import METRICS, SETTINGS


class Bigram:
    """Interpolated Kneser-Ney (Kneser and Ney 1995; Chen and Goodman 1999, section 2.7) over pairs of tokens."""

    def __init__(self, previous, following, vocab_size):
        self.vocab_size = vocab_size
        pairs, counts = np.unique(
            previous.astype(np.int64) * vocab_size + following, return_counts=True
        )
        self.pairs, self.counts = pairs, counts
        singles, doubles = (counts == 1).sum(), (counts == 2).sum()
        self.discount = singles / (singles + 2 * doubles)
        self.context_total = np.bincount(previous, minlength=vocab_size)
        self.context_types = np.bincount(pairs // vocab_size, minlength=vocab_size)
        # How many contexts a token follows, itself smoothed so that a token never seen has a probability too.
        continuations = np.bincount(pairs % vocab_size, minlength=vocab_size) + 0.1
        self.unigram = continuations / continuations.sum()

    def loss(self, previous, following):
        """Mean negative log likelihood of `following` after `previous`, in nats."""
        keys = previous.astype(np.int64) * self.vocab_size + following
        at = np.minimum(np.searchsorted(self.pairs, keys), len(self.pairs) - 1)
        count = np.where(self.pairs[at] == keys, self.counts[at], 0)
        total = self.context_total[previous]
        seen = np.maximum(count - self.discount, 0) / np.maximum(total, 1)
        backed_off = np.where(
            total > 0, self.discount * self.context_types[previous] / np.maximum(total, 1), 1.0
        )
        return float(-np.log(seen + backed_off * self.unigram[following]).mean())


def main():
    config, _ = resolve.resolve_settings({}, "config/demo.yaml")
    run = Path(config.checkpoint.save_ckpt_path)
    if not (run / SETTINGS).exists():
        began = time.perf_counter()
        subprocess.run(["./1.train.sbatch"], check=True)
        print(
            f"whole command: {time.perf_counter() - began:.0f} s, peak memory of its largest process "
            f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20:.2f} GiB\n"
        )
    entries = read(run / METRICS)
    validations = [entry for entry in entries if "val_loss" in entry]
    reports = [entry for entry in entries if "loss" in entry]
    tokens = reports[-1]["tokens"]

    sources, weights = training_sources(config.data)
    order = Sampler(sources, weights, config.data.seq_length, config.training.seed)
    length = config.data.seq_length
    which, windows, _ = order.samples(0, tokens // length)
    drawn = np.stack(
        [
            sources[order.names[source]].read(window * length, length + 1).tokens
            for source, window in zip(which, windows)
        ]
    )
    previous, following = (part.ravel().astype(np.int64) for part in (drawn[:, :-1], drawn[:, 1:]))
    bigram = Bigram(previous, following, config.model.vocab_size)
    losses = []
    global_batch = config.training.global_batch_size or config.training.batch_size  # on one process
    limit = config.training.eval_batches * global_batch or None
    for store in validation_sources(config.data):
        for batch in evaluation_batches(
            store,
            str(store.path),
            config.data,
            BatchLayout(0, 1, config.training.batch_size),
            vocab_size=config.model.vocab_size,
            limit=limit,
        ):
            counted = batch.labels.numpy() != IGNORED_LABEL
            losses.append(bigram.loss(batch.tokens.numpy()[counted], batch.labels.numpy()[counted]))
    first, last = validations[0]["val_perplexity"], validations[-1]["val_perplexity"]
    baseline = float(np.exp(np.mean(losses)))
    counts = [
        entry["tokens"] - before
        for entry, before in zip(reports, [0, *(e["tokens"] for e in reports)])
    ]
    seconds = sum(counts) / np.mean([entry["tokens_per_second"] for entry in reports])
    print(f"{'validation perplexity':<44}{'':>12}")
    print(f"  at step 0{'':<33}{first:>12,.1f}")
    print(f"  at step {validations[-1]['step']:<34}{last:>12,.1f}")
    print(f"  bigram with back-off on the same {tokens:,} tokens{baseline:>8,.1f}")
    print(f"  falls by a factor of{'':<22}{first / last:>12,.1f}   (wanted: 8)")
    print(f"  beside the bigram model{'':<19}{last / baseline:>12,.2f}   (wanted: below 1)")
    print(f"training time without validation{'':<12}{seconds:>11,.0f} s (wanted: 180)")
    return 0 if first / last >= 8 and last < baseline else 1


if __name__ == "__main__":
    sys.exit(main())
