"""What is expected of a training on some machines: memory, seconds, and which settings would fit best. By formulas."""

import copy
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from config.devices import INSTANCES, Instance, device_peak
from config.train_config import TrainConfig
from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.model.spec import operator_uses
from mamba_fsdp.ops.backends import resolve_backends
from mamba_fsdp.parallel.memory import expected_memory, recomputing
from mamba_fsdp.parallel.roofline import step_seconds
from mamba_fsdp.parallel.world import CPU, World
from mamba_fsdp.report.console import scaled
from mamba_fsdp.train.setup import split_step

SHARES, SIZES = (
    ("1", "1/2", "1/4", "0"),
    [2**power for power in range(9)],
)  # that recompute; of micro-batches


@dataclass
class Estimate:
    settings: TrainConfig
    nodes: int
    instance: Instance
    memory: dict[str, int]  # bytes of a device by part; what the framework takes among them
    parts: dict[str, float]  # seconds of a step; none where the device's rates are not known
    tokens_per_step: int

    def __post_init__(self) -> None:
        self.devices, self.total = self.nodes * self.instance.devices, sum(self.memory.values())
        self.largest = max(self.memory, key=lambda part: self.memory[part])
        self.fits = self.total <= self.instance.memory * 1e9
        self.seconds = sum(seconds for part, seconds in self.parts.items() if part != "hidden")
        self.rate = (
            self.tokens_per_step / self.seconds if self.parts else 0.0
        )  # tokens/s of all devices

    def row(self) -> dict[str, Any]:
        """What tells it from others, as settings and figures."""
        parallel = self.settings.parallel
        share = parallel.selective_checkpointing if parallel.fsdp_activation_checkpointing else "0"
        return {
            "nodes": self.nodes,
            "batch_size": self.settings.training.batch_size,
            "recompute": share,
            "global_batch_size": self.tokens_per_step // self.settings.data.seq_length,
            "bytes": self.total,
            "tokens_per_second": round(self.rate),
            "fits": self.fits,
        }


def estimate(settings: TrainConfig, nodes: int, instance: Instance) -> Estimate:
    """Of a training on so many nodes. Raises UserError for what can't be split over their devices. Of the framework's
    memory CUDA takes half a gigabyte, NCCL one, gaps between allocations a twentieth of what comes and goes."""
    world, training = (
        World(0, nodes * instance.devices, 0, instance.devices, CPU),
        settings.training,
    )
    uses = operator_uses(
        settings.model,
        DTYPES[training.mixed_precision],
        settings.data.reset_at_documents,
        training.deterministic,
    )
    backends = resolve_backends(
        training.kernels, "cpu" if instance.device == "cpu" else "cuda", uses, ("triton",)
    ).backends
    split, memory = split_step(training, world), expected_memory(settings, world, backends)
    if instance.device != "cpu":
        passing = sum(memory[part] for part in ("gathered", "activations", "loss"))
        memory["framework"] = int(0.5e9 + (1e9 if world.size > 1 else 0) + passing / 20)
    parts = (
        step_seconds(settings, world, instance, split.grad_accumulation_steps, backends)
        if instance.tflops()
        else {}
    )
    return Estimate(
        settings, nodes, instance, memory, parts, split.global_batch * settings.data.seq_length
    )


def best(settings: TrainConfig, nodes: int, instance: Instance) -> Estimate | None:
    """With other batch sizes and shares of recomputing blocks: what takes least memory of those that fit and are, but
    for a hundredth, the fastest; where rates are not known, the largest of those that recompute least."""
    tried = _others(settings, nodes, instance)
    least = next(tried, None)
    if not least or not least.fits:
        return None
    fitting = [least, *(other for other in tried if other.fits)]
    if not least.parts:
        return min(fitting, key=lambda other: (sum(recomputing(other.settings)), -other.total))
    fastest = max(other.rate for other in fitting)
    return min(
        (other for other in fitting if other.rate >= 0.99 * fastest), key=lambda other: other.total
    )


def _others(settings: TrainConfig, nodes: int, instance: Instance) -> Iterator[Estimate]:
    """The one that takes least memory first. A global_batch_size that is given stays."""
    samples, ranks = settings.training.global_batch_size, nodes * instance.devices
    for size in range(1, min(samples // ranks, SIZES[-1]) + 1) if samples else SIZES:
        for share in SHARES if samples % (size * ranks) == 0 else ():
            other = copy.deepcopy(settings)
            other.training.batch_size, other.parallel.selective_checkpointing = size, share
            other.parallel.fsdp_activation_checkpointing = share != "0"
            yield estimate(other, nodes, instance)


def at_hand() -> Instance:
    """This machine: its GPUs, with what is known of their kind, or a CPU, whose rates are not known."""
    if not torch.cuda.is_available():
        return Instance(
            "cpu", 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 0, 0, 0
        )
    gpu, size = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1] / 1e9
    peak = (device_peak(gpu) or 0) / 1e12
    alike = [
        each
        for each in INSTANCES.values()
        if each.device in re.split("[ -]", gpu) and each.tflops() == peak
    ]
    nearest = min(
        alike, key=lambda each: abs(each.memory - size), default=Instance("", 1, 0, 0, 32, 10)
    )
    return nearest._replace(device=gpu, devices=torch.cuda.device_count(), memory=size, peak=peak)


def what_would_fit(settings: TrainConfig, world: World) -> str:
    """For a run that ran out of memory: its largest part, and on a GPU the settings that fit by these formulas."""
    nodes, machine = world.size // world.local_size, at_hand()._replace(devices=world.local_size)
    it = estimate(settings, nodes, machine)
    said = f"most are the {it.largest}, {scaled(it.memory[it.largest], 'B')} of {scaled(it.total, 'B')} expected"
    if machine.device == "cpu" or not (found := best(settings, nodes, machine)):
        return said
    return "{}; plan takes batch_size={batch_size}, selective_checkpointing={recompute}".format(
        said, **found.row()
    )
