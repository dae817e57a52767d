"""Measures the host time of a training step on a GPU, with a null device that computes nothing:

    .venv-torch2.2/bin/python -m benchmarks.launches    with the pinned stack
    .venv/bin/python -m benchmarks.launches             with a current stack, which is installed in a cache folder

Prints the CPU time and the number of launches of a block (forward and backward pass of a micro-batch) and of a step. The
figures of a block are the difference between a model with twice the layers and the model. Launches are counted separately for
torch, Triton and cuBLAS.
"""

import ctypes
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.measure import steps_in_turn, table
from benchmarks.our_step import our_step
from mamba_fsdp.settings.resolve import resolve_settings
from mamba_fsdp.settings.train_config import TrainConfig
from tests.support.nullgpu import build

MODELS = {
    "Mamba-1": {"layers": "mamba1", "n_layer": 8},
    "Mamba-2": {"layers": "mamba2", "n_layer": 8},
    "mamba-130m": {"model_name": "mamba-130m"},
    "mamba-130m, Muon": {"model_name": "mamba-130m", "optimizer": "muon"},
}
SHAPE = {"batch_size": 2, "seq_length": 4096, "global_batch_size": 0, "recipe": "published"}


def counted_step(settings: TrainConfig, layers: int) -> Callable[[], torch.Tensor]:
    """Returns a function that takes a step of a model with `layers` layers. This function returns the numbers of launches in
    this process so far: of torch, of Triton and of cuBLAS."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    step = our_step(settings, torch.device("cuda"), n_layer=layers)
    tokens = torch.zeros(SHAPE["batch_size"], SHAPE["seq_length"] + 1, dtype=torch.long).cuda()

    def counted() -> torch.Tensor:
        step(tokens)
        return torch.tensor([library.nullgpu_counter(kind) for kind in range(3)])

    return counted


def row(model: str) -> dict[str, object]:
    """Returns the row of a model in the table."""
    settings = resolve_settings(MODELS[model] | SHAPE)
    layers = settings.model.n_layer
    makers = {count: partial(counted_step, settings, count) for count in (layers, 2 * layers)}
    once, twice = steps_in_turn(makers, 15).values()
    more = statistics.median(b.cpu_seconds - a.cpu_seconds for a, b in zip(once, twice))
    launches, of_twice = (steps[1].returned - steps[0].returned for steps in (once, twice))
    return {
        "model": model,
        "block, CPU ms": f"{1e3 * more / layers:.2f}",
        "its launches": ((of_twice - launches) / layers).round().int().tolist(),
        "step, CPU ms": f"{1e3 * statistics.median(each.cpu_seconds for each in once):.0f}",
        "step's launches": launches.tolist(),
    }


def main() -> None:
    if "LD_PRELOAD" in os.environ:  # this process uses the null device
        print(table(row(model) for model in MODELS))
        return
    with tempfile.TemporaryDirectory() as folder:
        device = Path(folder)
        build.build(device)
        command = [build.interpreter(device), "-m", "benchmarks.launches"]
        subprocess.run(command, env=build.environment(device), check=True)


if __name__ == "__main__":
    main()
