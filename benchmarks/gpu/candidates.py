"""Compares launch configurations and backends in a layer of each preset: first errors, then times.

A candidate is a text with assignments. `scan.triton.CHUNK=32` replaces a constant in mamba_fsdp/ops/scan/triton.py,
`ssd.triton.SWEEP.P=32` replaces an entry of a table in mamba_fsdp/ops/ssd/triton.py for all GPUs, and `norm=reference`
selects another backend, like --kernels. The empty text means our kernels with the library's configuration.

Several processes compile the candidates and compare them with float64. After that, the candidates take turns on the GPU. Two
times are measured: the forward and backward pass of a layer, and a whole step of a model with one layer.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from unittest import mock

import torch

from benchmarks.gpu.models import (
    PRESETS,
    Row,
    Step,
    Steps,
    initial_weights,
    made_up_tokens,
    settings_of,
    time_steps,
)
from benchmarks.measure import in_processes
from benchmarks.our_step import our_step
from mamba_fsdp.errors import first_line
from mamba_fsdp.ops.backends import BackendChoice, resolve_backends
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer.layer_check import LayerCheck

CANDIDATES = {
    "mamba2-1.3b": (
        "",
        "ssd.triton.SWEEP.P=32 ssd.triton.SWEEP.num_stages=2",
        "ssd.triton.NEAR.num_warps=8",
        "ssd.triton.FAR.ROWS=32",
        "norm=reference",
    ),
    "mamba-1.4b": (
        "",
        "scan.triton.CHUNK=32",
        "scan.triton.FORWARD_CHANNELS=16",
        "scan.triton.CHUNK=32 scan.triton.FORWARD_CHANNELS=16",
        "loss.CHUNK_ON_GPU=8192",
        "loss=reference",
    ),
}
PROCESSES = 12
ROUNDS = 3
STEPS = Steps(1, 5)


@contextmanager
def configured(settings: TrainConfig, candidate: str) -> Iterator[TrainConfig]:
    """Inside the block, replaces constants of modules by the values in `candidate`. Yields the settings with the backends in
    `candidate`.

    candidate: items such as "scan.triton.CHUNK=32" (a constant) and "norm=reference" (a backend), separated by spaces."""
    backends = []
    with ExitStack() as replaced:
        for assignment in candidate.split():
            named = re.fullmatch(r"([a-z.]+)\.([A-Z_]+)\.?(\w*)=(\d+)", assignment)
            if not named:
                backends.append(assignment)
                continue
            module = import_module(f"mamba_fsdp.ops.{named[1]}")
            value = int(named[4])
            if named[3]:
                table = getattr(module, named[2])
                value = {gpu: options | {named[3]: value} for gpu, options in table.items()}
            replaced.enter_context(mock.patch.object(module, named[2], value))
        yield settings.with_values(kernels=",".join(backends) or "auto")


def choose(settings: TrainConfig, device: torch.device) -> BackendChoice:
    """Returns the backends in the settings, and our kernels for all other operators."""
    uses = settings.operator_uses(device.type)
    ours = dict.fromkeys(uses, "triton")
    return resolve_backends(settings.training.kernels, device.type, uses, preferred=ours)


def compare_values(device: torch.device, rehearse: bool, job: tuple[str, str]) -> Row:
    """Returns the cells about values for a candidate: its largest error compared with float64, and whether a second run gives
    the same bits."""
    name, candidate = job
    row: Row = dict.fromkeys(("error", "right", "same bits", "layer ms", "step ms", "note"), "")
    with configured(settings_of(name, rehearse), candidate) as settings:
        layers = LayerCheck(settings, device)
        try:
            backends = choose(settings, device).backends
            for kind in layers.kinds:
                found = layers.measure(kind, backends)
                repeated = layers.measure(kind, backends)
                row |= {"error": f"{found.error:.1e} of {found.tensor}", "right": found.share <= 1}
                row["same bits"] = repeated == found
        except Exception as error:
            row["note"] = f"{type(error).__name__}: {first_line(error)}"
    return row


def measure(device: torch.device, rehearse: bool) -> Iterator[Row]:
    jobs = [(name, candidate) for name, listed in CANDIDATES.items() for candidate in listed]
    values = in_processes(partial(compare_values, device, rehearse), jobs, PROCESSES)
    for (name, candidate), row in zip(jobs, values):
        yield {"preset": name, "candidate": candidate} | row
    for name in CANDIDATES:
        for row in compare_times(name, device, rehearse):
            yield {"preset": name} | row


def compare_times(name: str, device: torch.device, rehearse: bool) -> Iterator[Row]:
    """Yields the times of a layer and of a step. Candidates that fail are left out; `compare_values` reports the reason."""
    usual = settings_of(name, rehearse, n_layer=1)
    weights = initial_weights(usual)
    tokens = made_up_tokens(usual, device)
    steps: dict[str, Step] = {}
    for candidate in CANDIDATES[name]:
        with configured(usual, candidate) as settings, suppress(Exception):
            step = our_step(settings, device, weights, preferred="triton")
            step(tokens)
            steps[candidate] = step
    layer_times = defaultdict(list)
    step_times = defaultdict(list)
    for _ in range(ROUNDS):
        for candidate, step in steps.items():
            with configured(usual, candidate) as settings:
                backends = choose(settings, device).backends
                layer_times[candidate].append(LayerCheck(settings, device).milliseconds(backends))
                step_times[candidate] += time_steps(step, tokens, STEPS)[1]
    for candidate in steps:
        layer = statistics.median(layer_times[candidate])
        whole = 1e3 * statistics.median(step_times[candidate])
        yield {"candidate": candidate, "layer ms": f"{layer:.2f}", "step ms": f"{whole:.2f}"}


def run_kernels(device: torch.device, small: bool) -> Iterator[Row]:
    """Runs our kernels in a layer of each preset. small: use the inputs with which a run checks its kernels at the start,
    instead of the inputs of a step."""
    for name in PRESETS:
        settings = settings_of(name, small).with_values(reset_at_documents=small)
        layers = LayerCheck(settings, device)
        choice = choose(settings, device)
        for kind in layers.kinds:
            if small:
                layers.results(kind, choice.backends)
            else:
                layers.run(layers.make_model([kind], choice.backends), layers.shape)
        yield {"preset": name, "ran": str(choice)}
