"""Compares Muon with AdamW on the demo, at equal steps and at equal time: `python -m benchmarks.muon [--steps 1000]
[--seeds 3]`.

Each takes the best of the learning rates for the first seed. The time of a step is taken in turn, in this process, with the
runs' number of threads; within AdamW's time Muon has so many fewer steps, with a schedule of that length. Validation is on
the demo's batches, in nats per token.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.measure import time_in_turn
from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.model.spec import operator_uses, parameters
from mamba_fsdp.ops.backends import resolve_backends
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run.names import METRICS
from mamba_fsdp.run.records import read
from mamba_fsdp.settings import resolve
from mamba_fsdp.trainer.optimizer import make_optimizer
from mamba_fsdp.trainer.setup import build_model, fill_at_random

DEMO = "config/demo.yaml"
RATES = (3e-3, 6e-3, 1.2e-2)
ROUNDS = 15


def step_of(optimizer):
    """Returns a function that takes a step of the demo."""
    settings = resolve.resolve_settings({"optimizer": optimizer}, DEMO)
    training = settings.training
    dtype = DTYPES[training.precision("cpu")]
    backends = resolve_backends("auto", "cpu", operator_uses(settings.model, dtype)).backends
    parallel = build_model(settings, World.alone(), backends)
    fill_at_random(settings, parallel)
    own = make_optimizer(parallel, parameters(settings.model), settings.optimizer, dtype)
    tokens = torch.randint(
        settings.model.vocab_size, (training.batch_size, settings.data.seq_length)
    )

    def step():
        parallel.module(tokens, labels=tokens).backward()
        own.step()
        own.zero_grad(set_to_none=True)

    return step


def train(optimizer, rate, seed, steps, folder):
    """Returns the validation loss at the end of a run."""
    run = folder / f"{optimizer}-{rate}-{seed}-{steps}"
    given = {
        "config": DEMO,
        "optimizer": optimizer,
        "learning_rate": rate,
        "seed": seed,
        "num_steps": steps,
        "warmup_steps": -1,
        "eval_interval": steps,
        "checkpoint_interval": steps,
        "publish": False,
        "save_ckpt_path": run,
    }
    words = [f"--{name}={value}" for name, value in given.items()]
    subprocess.run([sys.executable, "training.py", *words], check=True, stdout=subprocess.DEVNULL)
    return [entry["val_loss"] for entry in read(run / METRICS) if "val_loss" in entry][-1]


def main():
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--steps", type=int, default=1000)
    words.add_argument("--seeds", type=int, default=3)
    given = words.parse_args()
    names = ("adamw", "muon")
    seconds = time_in_turn({name: step_of(name) for name in names}, ROUNDS)
    ratio = seconds["muon"][0] / seconds["adamw"][0]
    fewer = round(given.steps / ratio)
    print(
        f"a step of muon takes {ratio:.3f} times as long: {fewer} steps in the time of {given.steps}",
        flush=True,
    )
    seeds = range(2023, 2023 + given.seeds)
    with tempfile.TemporaryDirectory() as folder:

        def run(name, rate, seed, steps=given.steps):
            return train(name, rate, seed, steps, Path(folder))

        best = {}
        first = {}
        for name in names:
            losses = {rate: run(name, rate, seeds[0]) for rate in RATES}
            told = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in losses.items())
            print(f"{name:<8}by learning rate {told}", flush=True)
            best[name] = min(losses, key=losses.get)
            first[name] = losses[best[name]]
        rows = {
            f"{name}, {given.steps} steps": [
                first[name],
                *(run(name, best[name], seed) for seed in seeds[1:]),
            ]
            for name in names
        }
        rows[f"muon, {fewer} steps"] = [run("muon", best["muon"], seed, fewer) for seed in seeds]
    print(f"{'':<24}{'mean':>8}   seeds")
    for name, losses in rows.items():
        each = "  ".join(f"{loss:.4f}" for loss in losses)
        print(f"{name:<24}{statistics.mean(losses):>8.4f}   {each}")


if __name__ == "__main__":
    main()
