"""What is expected of a training on some machines: memory, seconds, length, and which settings would fit best."""

import copy
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from config.train_config import TrainConfig
from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.data.loader import split_step
from mamba_fsdp.model.spec import flops_per_token, operator_uses, parameter_count
from mamba_fsdp.ops.backends import resolve_backends
from mamba_fsdp.parallel.world import CPU, World
from mamba_fsdp.planning.devices import INSTANCES, Instance, device_peak
from mamba_fsdp.planning.memory import Workload, expected_memory
from mamba_fsdp.planning.roofline import step_seconds
from mamba_fsdp.report.console import scaled

CHECKPOINT_BYTES = 12  # of a parameter: the weight and AdamW's two moments, all fp32
RECOMPUTED_SHARES = ("1", "1/2", "1/4", "0")  # that are tried; the least memory first
LARGEST_BATCH = 256  # of a device, that is tried


@dataclass(frozen=True)
class Estimate:
    settings: TrainConfig
    nodes: int
    machine: Instance
    memory: dict[str, int]  # bytes of a device by part; what the framework takes among them
    seconds: dict[str, float]  # of a step by part; empty where the device's rates are not known
    tokens_per_step: int

    @property
    def devices(self) -> int:
        return self.nodes * self.machine.devices

    @property
    def total_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def largest_part(self) -> str:
        return max(self.memory, key=self.memory.__getitem__)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.machine.memory * 1e9

    @property
    def seconds_per_step(self) -> float:
        return sum(self.seconds.values()) - self.seconds.get("hidden", 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Of all devices; 0 where their rates are not known."""
        return self.tokens_per_step / self.seconds_per_step if self.seconds else 0.0

    @property
    def share_of_peak(self) -> float:
        flops = flops_per_token(self.settings.model, self.settings.data.seq_length)
        peak = self.devices * self.machine.tflops() * 1e12
        return self.tokens_per_second * flops / peak

    @property
    def checkpoint_bytes(self) -> int:
        return CHECKPOINT_BYTES * parameter_count(self.settings.model)

    def days(self, tokens: int) -> float:
        return tokens / self.tokens_per_second / 86400

    def row(self) -> dict[str, Any]:
        """Returns what tells this estimate from others, as settings and figures."""
        parallel = self.settings.parallel
        share = parallel.selective_checkpointing if parallel.fsdp_activation_checkpointing else "0"
        return {
            "nodes": self.nodes,
            "batch_size": self.settings.training.batch_size,
            "recompute": share,
            "global_batch_size": self.tokens_per_step // self.settings.data.seq_length,
            "bytes": self.total_bytes,
            "tokens_per_second": round(self.tokens_per_second),
            "fits": self.fits,
        }


def estimate(settings: TrainConfig, nodes: int, machine: Instance) -> Estimate:
    """Returns what is expected of a training on so many nodes. Raises UserError for what can't be split over them."""
    world = World(0, nodes * machine.devices, 0, machine.devices, CPU)
    training = settings.training
    layout = split_step(training, world.rank, world.size)
    dtype = DTYPES[training.mixed_precision]
    uses = operator_uses(
        settings.model, dtype, settings.data.reset_at_documents, training.deterministic
    )
    device_type = "cpu" if machine.device == "cpu" else "cuda"
    backends = resolve_backends(training.kernels, device_type, uses, ("triton",)).backends
    memory = expected_memory(settings, world, backends)
    if device_type == "cuda":
        memory["framework"] = framework_bytes(memory, world)
    seconds = {}
    if machine.tflops():
        passes = layout.grad_accumulation_steps
        seconds = step_seconds(settings, world, machine, passes, backends)
    tokens = layout.global_batch * settings.data.seq_length
    return Estimate(settings, nodes, machine, memory, seconds, tokens)


def framework_bytes(memory: dict[str, int], world: World) -> int:
    """About what CUDA takes (half a gigabyte), NCCL (one), and gaps between allocations (a twentieth of what passes)."""
    passing = memory["gathered"] + memory["activations"] + memory["loss"]
    nccl = 1e9 if world.size > 1 else 0
    return int(0.5e9 + nccl + passing / 20)


def best(settings: TrainConfig, nodes: int, machine: Instance) -> Estimate | None:
    """Returns the best of other batch sizes and shares of recomputing blocks that fits, None where none does.

    That is the one that takes least memory of those that are the fastest, but for a hundredth; where rates are not
    known, the largest of those that recompute least.
    """
    others = _others(settings, nodes, machine)
    smallest = next(others, None)
    if not smallest or not smallest.fits:
        return None
    fitting = [smallest, *(other for other in others if other.fits)]
    if not smallest.seconds:
        return min(fitting, key=lambda other: (_recomputing_blocks(other), -other.total_bytes))
    fastest = max(other.tokens_per_second for other in fitting)
    fast = [other for other in fitting if other.tokens_per_second >= 0.99 * fastest]
    return min(fast, key=lambda other: other.total_bytes)


def best_on_more_nodes(settings: TrainConfig, nodes: int, machine: Instance) -> Estimate | None:
    """Returns the best on so many nodes, or on the fewest doublings of them that fit, up to 128 times."""
    for power in range(8):
        found = best(settings, nodes * 2**power, machine)
        if found:
            return found
    return None


def _recomputing_blocks(found: Estimate) -> int:
    return sum(Workload(found.settings, World.alone(), {}).recomputes)


def _others(settings: TrainConfig, nodes: int, machine: Instance) -> Iterator[Estimate]:
    """Yields the estimates to choose from, the least memory first. A global_batch_size that is given stays."""
    ranks = nodes * machine.devices
    samples = settings.training.global_batch_size
    if samples:
        sizes = [
            size
            for size in range(1, min(samples // ranks, LARGEST_BATCH) + 1)
            if samples % (size * ranks) == 0
        ]
    else:
        sizes = [2**power for power in range(LARGEST_BATCH.bit_length())]
    for size in sizes:
        for share in RECOMPUTED_SHARES:
            other = copy.deepcopy(settings)
            other.training.batch_size = size
            other.parallel.selective_checkpointing = share
            other.parallel.fsdp_activation_checkpointing = share != "0"
            yield estimate(other, nodes, machine)


def machine_at_hand() -> Instance:
    """Returns this machine: its GPUs, with what is known of their kind, or a CPU, whose rates are not known."""
    if not torch.cuda.is_available():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
        return Instance("cpu", 1, memory, bandwidth=0, nvlink=0, network=0)
    gpu = torch.cuda.get_device_name()
    memory = torch.cuda.mem_get_info()[1] / 1e9
    peak = (device_peak(gpu) or 0) / 1e12
    words = re.split("[ -]", gpu)
    alike = [each for each in INSTANCES.values() if each.device in words and each.tflops() == peak]
    unknown = Instance("", 1, 0, bandwidth=0, nvlink=32, network=10)
    nearest = min(alike, key=lambda each: abs(each.memory - memory), default=unknown)
    return replace(nearest, device=gpu, devices=torch.cuda.device_count(), memory=memory, peak=peak)


def what_would_fit(settings: TrainConfig, world: World) -> str:
    """Says for a run that ran out of memory what its largest part is, and on a GPU which settings are expected to fit."""
    nodes = world.size // world.local_size
    machine = replace(machine_at_hand(), devices=world.local_size)
    found = estimate(settings, nodes, machine)
    largest = scaled(found.memory[found.largest_part], "B")
    said = (
        f"most are the {found.largest_part}, {largest} of {scaled(found.total_bytes, 'B')} expected"
    )
    if machine.device == "cpu":
        return said
    better = best(settings, nodes, machine)
    if not better:
        return said
    row = better.row()
    return (
        f"{said}; plan takes batch_size={row['batch_size']}, "
        f"selective_checkpointing={row['recompute']}"
    )
