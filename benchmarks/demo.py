"""Compares the demo's result with a bigram model: `python -m benchmarks.demo`.

Run after ./1.train.sbatch, or it trains the demo first. The bigram model with back-off (interpolated Kneser-Ney, one
discount from the counts) is estimated on exactly the tokens that the run has drawn, and both are scored on the same
validation windows.
"""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.measure import command_line
from mamba_fsdp.conventions import IGNORED_LABEL
from mamba_fsdp.data.loader import BatchShape, evaluation_batches
from mamba_fsdp.data.sampler import Sampler
from mamba_fsdp.data.selection import training_sources, validation_sources
from mamba_fsdp.run.names import METRICS, SETTINGS
from mamba_fsdp.run.records import read_entries
from mamba_fsdp.settings import resolve
from mamba_fsdp.settings.train_config import TrainConfig


class Bigram:
    """Interpolated Kneser-Ney (Kneser and Ney 1995; Chen and Goodman 1999, section 2.7) over pairs of tokens."""

    def __init__(self, previous, following, vocab_size):
        self.vocab_size = vocab_size
        pairs, counts = np.unique(
            previous.astype(np.int64) * vocab_size + following, return_counts=True
        )
        self.pairs = pairs
        self.counts = counts
        singles = (counts == 1).sum()
        doubles = (counts == 2).sum()
        self.discount = singles / (singles + 2 * doubles)
        self.context_total = np.bincount(previous, minlength=vocab_size)
        self.context_types = np.bincount(pairs // vocab_size, minlength=vocab_size)
        # How many contexts a token follows, itself smoothed so that a token never seen has a probability too.
        continuations = np.bincount(pairs % vocab_size, minlength=vocab_size) + 0.1
        self.unigram = continuations / continuations.sum()

    def loss(self, previous, following):
        """Returns the mean negative log likelihood of `following` after `previous`, in nats."""
        keys = previous.astype(np.int64) * self.vocab_size + following
        at = np.minimum(np.searchsorted(self.pairs, keys), len(self.pairs) - 1)
        count = np.where(self.pairs[at] == keys, self.counts[at], 0)
        total = self.context_total[previous]
        seen = np.maximum(count - self.discount, 0) / np.maximum(total, 1)
        backed_off = np.where(
            total > 0, self.discount * self.context_types[previous] / np.maximum(total, 1), 1.0
        )
        return float(-np.log(seen + backed_off * self.unigram[following]).mean())


def tokens_drawn(config: TrainConfig, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first `count` tokens that the run was trained on, and their successors."""
    length = config.data.seq_length
    sources, weights = training_sources(config.data)
    sampler = Sampler(sources, weights, length, config.training.seed)
    which, windows = sampler.samples(0, count // length)
    drawn = np.stack(
        [
            sources[sampler.names[source]].read(window * length, length + 1).tokens
            for source, window in zip(which, windows)
        ]
    )
    return drawn[:, :-1].ravel(), drawn[:, 1:].ravel()


def validation_loss(bigram: Bigram, config: TrainConfig) -> float:
    """Returns the bigram model's mean loss over the windows that the run was validated on, by one process."""
    training = config.training
    global_batch = training.global_batch_size or training.batch_size
    losses = []
    for store in validation_sources(config.data).values():
        for batch in evaluation_batches(
            store,
            str(store.path),
            config.data,
            BatchShape(0, 1, training.batch_size),
            vocab_size=config.model.vocab_size,
            limit=training.eval_batches * global_batch or None,
            stride=config.data.seq_length,
        ):
            counted = batch.labels.numpy() != IGNORED_LABEL
            losses.append(bigram.loss(batch.tokens.numpy()[counted], batch.labels.numpy()[counted]))
    return float(np.mean(losses))


def main() -> int:
    command_line(__doc__).parse_args()  # takes no words but --help
    config = resolve.resolve_settings({}, "config/demo.yaml")
    run = Path(config.checkpoint.save_ckpt_path)
    if not (run / SETTINGS).exists():
        began = time.perf_counter()
        subprocess.run(["./1.train.sbatch"], check=True)
        print(f"the whole command took {time.perf_counter() - began:.0f} s")
    entries = read_entries(run / METRICS)
    perplexities = [entry["val_perplexity"] for entry in entries if "val_loss" in entry]
    reports = [entry for entry in entries if "loss" in entry]
    tokens = reports[-1]["tokens"]
    bigram = Bigram(*tokens_drawn(config, tokens), config.model.vocab_size)
    baseline = float(np.exp(validation_loss(bigram, config)))
    seconds = tokens / np.mean([entry["tokens_per_second"] for entry in reports])
    first = perplexities[0]
    last = perplexities[-1]
    print(f"validation perplexity at step 0 {first:,.1f}, at the end {last:,.1f}")
    print(f"of a bigram model with back-off on the same {tokens:,} tokens {baseline:,.1f}")
    print(f"training without validation takes {seconds:,.0f} s")
    return 0 if first >= 8 * last and last < baseline else 1


if __name__ == "__main__":
    sys.exit(main())
