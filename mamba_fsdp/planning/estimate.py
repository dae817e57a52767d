"""Estimates the memory and the time of a training run on given machines, and finds the fastest settings that fit."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch

from mamba_fsdp.data.loader import split_step
from mamba_fsdp.model.spec import flops_per_token
from mamba_fsdp.ops.backends import resolve_backends
from mamba_fsdp.parallel.world import World
from mamba_fsdp.planning.devices import Instance
from mamba_fsdp.planning.memory import Workload, expected_memory
from mamba_fsdp.planning.passes import PassBytes
from mamba_fsdp.planning.roofline import step_seconds
from mamba_fsdp.run.layout import CHECKPOINT_BYTES_PER_PARAMETER
from mamba_fsdp.settings.train_config import TrainConfig

# Fractions of recomputing blocks. The first takes the least memory.
CANDIDATE_SHARES = ("1", "1/2", "1/4", "0")
CANDIDATE_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # sequences per micro-batch


@dataclass(frozen=True)
class Estimate:
    """The estimate of a training run. `plan --json` prints these fields. Rates are for all devices together. Times and
    rates are 0 if the peak or the bandwidth of the devices is unknown."""

    parameters: int
    nodes: int
    devices: int
    batch_size: int
    recompute: str  # fraction of the blocks that recompute their activations
    global_batch_size: int
    tokens_per_step: int
    memory: dict[str, int]  # {part: bytes per device}, see expected_memory and framework_bytes
    bytes: int  # the sum of `memory`
    fits: bool
    checkpoint_bytes: int
    step: dict[str, float]  # {part: seconds}, see step_seconds
    seconds_per_step: float
    tokens_per_second: float
    share_of_peak: float


def estimate(settings: TrainConfig, nodes: int, machine: Instance) -> Estimate:
    """Returns the estimate of a training run on `nodes` machines. Raises UserError if the settings don't fit the number
    of devices."""
    return _estimate(_workload(settings, nodes, machine), machine)


def _workload(
    settings: TrainConfig, nodes: int, machine: Instance, measured: PassBytes | None = None
) -> Workload:
    device_type = "cpu" if machine.device == "cpu" else "cuda"
    world = World(0, nodes * machine.devices, machine.devices, torch.device(device_type))
    uses = settings.operator_uses(device_type)
    choice = resolve_backends(settings.training.kernels, device_type, uses, ("triton",))
    return Workload(settings, world, choice.backends, measured)


def _estimate(work: Workload, machine: Instance) -> Estimate:
    settings = work.settings
    training = settings.training
    parallel = settings.parallel
    world = work.world
    batch_shape = split_step(settings, world.rank, world.size)
    memory = expected_memory(work)
    if machine.device != "cpu":
        memory["framework"] = framework_bytes(memory, world)
    tokens_per_step = batch_shape.global_batch * settings.data.seq_length
    step: dict[str, float] = {}
    seconds = rate = share_of_peak = 0.0
    if machine.tflops():
        step = step_seconds(work, machine, batch_shape.grad_accumulation_steps)
        seconds = sum(step.values()) - step["hidden"]
        rate = tokens_per_step / seconds
        flops = rate * flops_per_token(settings.model, settings.data.seq_length)
        share_of_peak = flops / (world.size * machine.tflops() * 1e12)
    return Estimate(
        parameters=work.parameter_count,
        nodes=world.size // world.local_size,
        devices=world.size,
        batch_size=training.batch_size,
        recompute=parallel.selective_checkpointing
        if parallel.fsdp_activation_checkpointing
        else "0",
        global_batch_size=batch_shape.global_batch,
        tokens_per_step=tokens_per_step,
        memory=memory,
        bytes=sum(memory.values()),
        fits=sum(memory.values()) <= machine.memory * 1e9,
        checkpoint_bytes=CHECKPOINT_BYTES_PER_PARAMETER * work.parameter_count,
        step=step,
        seconds_per_step=seconds,
        tokens_per_second=rate,
        share_of_peak=share_of_peak,
    )


def framework_bytes(memory: dict[str, int], world: World) -> int:
    """Returns a rough estimate of the memory for CUDA (0.5 GB), NCCL (1 GB) and gaps between allocations (5 % of the
    memory that a step allocates and frees)."""
    passing = memory["gathered"] + memory["activations"] + memory["loss"]
    nccl = 1e9 if world.size > 1 else 0
    return int(0.5e9 + nccl + passing / 20)


def best_estimate(settings: TrainConfig, nodes: int, machine: Instance) -> Estimate | None:
    """Tries batch sizes and fractions of recomputing blocks, and returns the best estimate, or None if none fits.

    The best estimate is the one with the least memory among all that reach 99 % of the highest speed. If the rates of
    the devices are unknown, the best estimate is the one that recomputes the fewest blocks and, among several of
    these, the one that takes the most memory.
    """
    others = _candidates(settings, nodes, machine)
    smallest = next(others, None)
    if not smallest or not smallest.fits:
        return None
    fitting = [smallest, *(other for other in others if other.fits)]
    if not smallest.step:
        return min(fitting, key=lambda other: (Fraction(other.recompute), -other.bytes))
    fastest = max(other.tokens_per_second for other in fitting)
    fast = [other for other in fitting if other.tokens_per_second >= 0.99 * fastest]
    return min(fast, key=lambda other: other.bytes)


def _candidates(settings: TrainConfig, nodes: int, machine: Instance) -> Iterator[Estimate]:
    """Yields the estimates of all candidates, the one with the least memory first. If global_batch_size
    is given, all candidates have this global batch size."""
    samples = settings.training.global_batch_size
    for size in CANDIDATE_BATCH_SIZES:
        if samples % (size * nodes * machine.devices):
            continue
        measured = None  # the passes do not depend on the fraction of recomputing blocks
        for share in CANDIDATE_SHARES:
            other = settings.with_values(
                batch_size=size,
                selective_checkpointing=share,
                fsdp_activation_checkpointing=share != "0",
            )
            work = _workload(other, nodes, machine, measured)
            expected = _estimate(work, machine)
            measured = work.passes
            yield expected
            if not expected.fits:
                break
        if share == CANDIDATE_SHARES[0]:
            return  # a larger batch does not fit either


def local_machine() -> Instance:
    """Returns the devices of this machine and their memory. Without a GPU, the CPU is one device with all the
    memory."""
    if torch.cuda.is_available():
        memory = torch.cuda.mem_get_info()[1]
        return Instance(torch.cuda.get_device_name(), torch.cuda.device_count(), memory / 1e9)
    return Instance("cpu", 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)
