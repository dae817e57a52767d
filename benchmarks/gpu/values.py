"""Measures each backend of each operator at the sizes of real models, in bf16: the largest error of any gradient
against float64, equal bits twice; and the time of a layer of each kind, forward and backward, in the backends that a
run may take.

The errors are of rows of 608 positions, for which Triton compiles the code that trains (lengths divisible by 4 are
other code), in all models, and then of 602."""

from collections.abc import Iterator, Mapping

import torch

from benchmarks.gpu.models import TINY
from mamba_fsdp.errors import first_line
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.presets import preset
from mamba_fsdp.ops.backends import OPERATORS, REFERENCE, candidates, parts_with, resolve_backends
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer.kernel_selection import KernelSelector
from mamba_fsdp.trainer.layer_check import Rows

TRITON = dict.fromkeys(OPERATORS, "triton")
MODELS = ("mamba-1.4b", "mamba2-2.7b", "bamba-9b")
POSITIONS = (608, 602)

Row = dict[str, object]


def uses_of(device: torch.device, small: bool) -> Iterator[tuple[str, KernelSelector]]:
    names = ["small"] if small else MODELS
    for name in names:
        settings = TrainConfig(ModelConfig(**(TINY if small else preset(name))))
        length = 100 if small else 2048
        yield (
            name,
            KernelSelector(settings.with_values(mixed_precision="bf16", seq_length=length), device),
        )


def measure(device: torch.device, small: bool) -> Iterator[Row]:
    for positions in POSITIONS:
        for name, use in uses_of(device, small):
            batch = use.layers.tests[0].batch
            use.layers.tests = [Rows(batch, positions)]
            for row in errors(use):
                yield {"model": name, "positions": positions} | row
            if positions == POSITIONS[0]:
                for title, preferred in (("auto", {}), ("triton", TRITON)):
                    row = {"model": name, "layer": ", ".join(use.layers.kinds), "operator": title}
                    yield row | {"note": time_of_layers(use, preferred)}


def run_triton(device: torch.device, small: bool) -> Iterator[Row]:
    """Runs our kernels once in a layer of each kind, forward and backward."""
    for name, use in uses_of(device, small):
        choice = resolve_backends("auto", device.type, use.uses, preferred=TRITON)
        layers = use.layers
        layers.run(layers.make_model(layers.kinds, choice.backends), layers.shape)
        yield {"model": name, "ran": str(choice)}


def errors(use: KernelSelector) -> Iterator[Row]:
    """Yields a row per backend of each operator, and kind of layer; the first are the reference's."""
    for operator, backend in [("all", "reference"), *candidates({}, use.device, use.uses)]:
        backends = REFERENCE | dict.fromkeys([operator, *parts_with(operator, backend)], backend)
        for layer in use.layers.kinds:
            row: Row = {"layer": layer, "operator": operator, "backend": backend}
            row |= dict.fromkeys(("worst", "error", "right", "same bits", "note"), "")
            try:
                found = use.layers.measure(layer, backends)
                repeated = use.layers.measure(layer, backends)
            except Exception as error:
                yield row | {"note": f"{type(error).__name__}: {first_line(error)}"}
                continue
            row |= {"worst": found.tensor, "error": f"{found.error:.1e}"}
            row |= {"right": found.share <= 1, "same bits": repeated == found}
            yield row


def time_of_layers(use: KernelSelector, preferred: Mapping[str, str]) -> str:
    """Returns what a layer of each kind takes, and in which backends; or why it fails."""
    try:
        choice = resolve_backends("auto", use.device, use.uses, preferred=preferred)
        taken = use.layers.milliseconds(choice.backends)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return f"{taken:.2f} ms; {choice}"
