"""Measures the host's part of a training step on a GPU, by the pinned stack on a device that computes nothing:

    .venv-torch2.2/bin/python -m benchmarks.launches

CPU time and launches of a block, forward and backward, for a micro-batch, and of all else in a step. A block's are a
model's with twice the layers less the model's own.
"""

import ctypes
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.measure import steps_in_turn, table
from benchmarks.our_step import our_step
from mamba_fsdp.planning.devices import INSTANCES
from mamba_fsdp.planning.estimate import estimate
from mamba_fsdp.settings.resolve import resolve_settings
from mamba_fsdp.settings.train_config import TrainConfig
from tests.support.nullgpu import build

MODELS = {
    "Mamba-1": {"layers": "mamba1", "d_model": 256, "n_layer": 8, "vocab_size": 512},
    "Mamba-2": {"layers": "mamba2", "d_model": 256, "n_layer": 8, "vocab_size": 512},
    "mamba-130m": {"model_name": "mamba-130m"},
}
ROUNDS = 15
SHAPE = {"batch_size": 2, "seq_length": 4096, "global_batch_size": 0}
KINDS = "torch, Triton, cuBLAS"  # the device's first three counters


def settings_of(model: str, times: int = 1) -> TrainConfig:
    settings = resolve_settings(MODELS[model] | SHAPE)
    return settings.changed(n_layer=times * settings.model.n_layer)


def counted_step(model: str, times: int) -> Callable[[], list[int]]:
    """Returns a function that takes a step and returns its launches, by kind."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    step = our_step(settings_of(model, times), torch.device("cuda"))
    tokens = torch.zeros(SHAPE["batch_size"], SHAPE["seq_length"] + 1, dtype=torch.long).cuda()

    def counted() -> list[int]:
        before = [library.nullgpu_counter(kind) for kind in range(3)]
        step(tokens)
        return [library.nullgpu_counter(kind) - count for kind, count in enumerate(before)]

    return counted


def row(model: str, environment: dict[str, str]) -> dict[str, str]:
    """Returns a row of the table."""
    makers = {times: partial(counted_step, model, times) for times in (1, 2)}
    once, twice = steps_in_turn(makers, ROUNDS, dict.fromkeys(makers, environment)).values()
    layers = settings_of(model).model.n_layer
    seconds = statistics.median(step.cpu_seconds for step in once)
    more = statistics.median(b.cpu_seconds - a.cpu_seconds for a, b in zip(once, twice))
    counts = list(zip(once[0].returned, twice[0].returned))
    planned = estimate(settings_of(model), 1, INSTANCES["p5.4xlarge"])
    return {
        "model": model,
        "block, CPU ms": f"{1e3 * more / layers:.2f}",
        f"its {KINDS}": ", ".join(f"{(many - few) / layers:.0f}" for few, many in counts),
        "all else": f"{1e3 * (seconds - more):.1f}",
        f"all else's {KINDS}": ", ".join(f"{2 * few - many}" for few, many in counts),
        "step": f"{1e3 * seconds:.0f}",
        "plan's step on an H100": f"{1e3 * planned.seconds_per_step:.0f}",
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build.build(folder)
        environment = build.environment(folder)
        print(table(row(model, environment) for model in MODELS))


if __name__ == "__main__":
    main()
