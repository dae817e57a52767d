"""Measures each backend of each operator at the sizes of real models, in bf16: the largest error of any gradient
against float64, equal bits twice; and the time of a layer of each kind, forward and backward, in the backends that a
run may take.

The errors are of rows of 608 positions, for which Triton compiles the code that trains (lengths divisible by 16 are
other code), in all models, and then of 600."""

from collections.abc import Iterator

import torch

from mamba_fsdp.errors import first_line
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.presets import preset
from mamba_fsdp.ops.backends import (
    OPERATORS,
    REFERENCE,
    candidates,
    parts_with,
    resolve_backends,
)
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer.first_use import FirstUse
from mamba_fsdp.trainer.layer_check import Rows

TRITON = dict.fromkeys(OPERATORS, "triton")
MODELS = ("mamba-1.4b", "mamba2-2.7b", "bamba-9b")
POSITIONS = (608, 600)
SMALL = {"layers": "mamba1,mamba2", "d_model": 64, "d_state": 16, "headdim": 32, "vocab_size": 200}


def use_of(model: ModelConfig, length: int, device: torch.device) -> FirstUse:
    settings = TrainConfig(model)
    settings = settings.changed(mixed_precision="bf16", seq_length=length)
    return FirstUse(settings, device)


def uses_of(device: torch.device, small: bool) -> Iterator[tuple[str, FirstUse]]:
    if small:
        yield "small", use_of(ModelConfig(**SMALL), 100, device)
        return
    for name in MODELS:
        yield name, use_of(ModelConfig(**preset(name)), 2048, device)


def measure(device: torch.device, small: bool) -> Iterator[dict[str, object]]:
    for positions in POSITIONS:
        for name, use in uses_of(device, small):
            batch = use.layers.tests[0].batch
            use.layers.tests = [Rows(batch, positions)]
            yield from measure_model(name, use, positions)
            if positions == POSITIONS[0]:
                yield from time_layers(name, use)


def run_triton(device: torch.device, small: bool) -> Iterator[dict[str, object]]:
    """Runs our kernels once in a layer of each kind, forward and backward."""
    for name, use in uses_of(device, small):
        choice = resolve_backends("auto", device.type, use.uses, preferred=TRITON)
        layers = use.layers
        layers.run(layers.make_model(layers.kinds, choice.backends), layers.shape)
        yield {"model": name, "ran": str(choice)}


def measure_model(name: str, use: FirstUse, positions: int) -> Iterator[dict[str, object]]:
    trials = [("all", "reference"), *candidates({}, use.device, use.uses)]
    for operator, backend in trials:
        backends = REFERENCE | dict.fromkeys(parts_with(operator, backend), backend)
        if operator != "all":
            backends[operator] = backend
        for layer in use.layers.kinds:
            row = {"model": name, "positions": positions, "layer": layer}
            row |= {"operator": operator, "backend": backend}
            row |= dict.fromkeys(("worst", "error", "right", "same bits", "note"), "")
            try:
                found = use.layers.measure(layer, backends)
                repeats = use.layers.measure(layer, backends) == found
            except Exception as error:
                yield row | {"note": f"{type(error).__name__}: {first_line(error)}"}
                continue
            row |= {"worst": found.tensor, "error": f"{found.error:.1e}"}
            row["right"] = "yes" if found.share <= 1 else "NO"
            row["same bits"] = "yes" if repeats else "no"
            yield row


def time_layers(name: str, use: FirstUse) -> Iterator[dict[str, object]]:
    for preferred in ({}, TRITON):
        row = {"model": name, "layer": ", ".join(use.layers.kinds), "operator": "all"}
        try:
            choice = resolve_backends("auto", use.device, use.uses, preferred=preferred)
            taken = use.layers.milliseconds(choice.backends)
        except Exception as error:
            yield row | {
                "backend": "triton" if preferred else "",
                "note": f"{type(error).__name__}: {first_line(error)}",
            }
            continue
        yield row | {"backend": str(choice).split("; reference")[0], "note": f"{taken:.2f} ms"}
