"""Measures what the training loop costs compared with the bare step of its model: `python -m benchmarks.step`.

A run on made-up tokens on this machine's CPU, one process. After each of its steps, with all that the loop does (data,
gradient norm, clipping, metrics, live line), a bare step is taken with the same weights and batch: forward, backward,
AdamW. For a small and a larger model: the medians of both and of their ratios, less 1.
"""

import argparse
import contextlib
import io
import statistics
import tempfile
import time

import torch

from mamba_fsdp.model.spec import parameters
from mamba_fsdp.settings import resolve
from mamba_fsdp.trainer import loop, run
from mamba_fsdp.trainer.optimizer import make_optimizer

MODELS = {
    "2 layers of 128, 4 x 256 tokens": {
        "d_model": 128,
        "n_layer": 2,
        "batch_size": 4,
        "seq_length": 256,
    },
    "4 layers of 256, 4 x 256 tokens": {
        "d_model": 256,
        "n_layer": 4,
        "batch_size": 4,
        "seq_length": 256,
    },
}
STEPS, WARM_UP = 20, 3


def seconds_of(given):
    """Returns [(seconds of a step of the loop, of a bare one after it)]."""
    found = []
    finish_step = loop.finish_step
    bare = None  # its optimiser, and when the last bare step ended

    def both(context, logger, saver, step):
        nonlocal bare
        stats, now = finish_step(context, logger, saver, step), time.perf_counter()
        optimizer, before = bare or (
            make_optimizer(
                context.parallel,
                parameters(context.settings.model),
                context.settings.optimizer,
                torch.float32,
            ),
            now,
        )
        optimizer.zero_grad(set_to_none=True)
        began = time.perf_counter()
        for batch in step.batches:
            (loop.batch_loss(context.parallel.module, batch) / batch.labels.numel()).backward()
        optimizer.step()
        bare = optimizer, time.perf_counter()
        found.append((now - before, bare[1] - began))
        return stats

    words = {
        **given,
        "use_dummy_dataset": "true",
        "num_steps": STEPS + WARM_UP,
        "eval_interval": 0,
        "publish": "false",
        "vocab_size": 4096,
        "report_interval": 1,
        "checkpoint_interval": 1000,
    }
    loop.finish_step = both
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            words = {
                name: str(value)
                for name, value in {**words, "save_ckpt_path": f"{folder}/run"}.items()
            }
            run.run_training(resolve.resolve_settings(words))
    finally:
        loop.finish_step = finish_step
    return found[WARM_UP:]


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()  # takes no words but --help
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {STEPS} steps of each in turn, seconds\n"
        f"{'model':<36}{'loop':>9}{'bare':>9}{'loop costs':>12}   (wanted: below 2 %)"
    )
    for name, given in MODELS.items():
        pairs = seconds_of(given)
        ours, bare = (statistics.median(times) for times in zip(*pairs))
        ratio = statistics.median(first / second for first, second in pairs)
        print(f"{name:<36}{ours:>9.4f}{bare:>9.4f}{ratio - 1:>11.1%}")


if __name__ == "__main__":
    main()
