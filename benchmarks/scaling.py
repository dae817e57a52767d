"""What sharding costs: `python -m benchmarks.scaling`.

1. FSDP on one process beside none: seconds per step at d_model 512, 8 layers, taken in turn.
2. Tokens/s of one process and of two that share this machine's cores.
3. Bytes that each of 16 ranks receives for weights and sends for gradients per step, from every preset's shapes, beside
   the least that fully sharded training needs: each weight gathered in bf16 for forward and backward, each gradient
   reduced in fp32. The count is checked in this run against the collectives that FSDP issues for a small model.
"""

import os
import statistics
import subprocess
import sys
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from config.model_config import ModelConfig
from config.presets import PRESETS, preset
from config.train_config import ParallelConfig
from mamba_fsdp.model.init import initial_part
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import operator_uses, parameter_count, parameters
from mamba_fsdp.ops import cpp
from mamba_fsdp.ops.backends import resolve_backends
from mamba_fsdp.parallel.model import fill_parts
from mamba_fsdp.parallel.parallelize import parallelize
from mamba_fsdp.parallel.world import World, start_world
from mamba_fsdp.train.optimizer import make_optimizer

SHAPE = ModelConfig(d_model=512, n_layer=8)
LENGTH, BATCH, ROUNDS = 256, 4, 9
RANKS = 16


def build(config, world, strategy, dtype=torch.float32):
    choice = resolve_backends("auto", "cpu", operator_uses(config, dtype))
    with torch.device("meta"):
        model = MambaLM(config, backends=choice.backends, compute_dtype=dtype)
    parallel = parallelize(
        model, ParallelConfig(sharding_strategy=strategy), world=world, compute_dtype=dtype
    )
    spec = parameters(config)
    fill_parts(
        parallel.shards(), lambda name, start, stop: initial_part(name, spec[name], 0, start, stop)
    )
    return parallel


def make_step(config, world, strategy, batch):
    parallel, spec = build(config, world, strategy), parameters(config)
    settings = mock.Mock(
        weight_decay=0.1, learning_rate=1e-4, beta1=0.9, beta2=0.95, adam_epsilon=1e-8
    )
    optimizer = make_optimizer(parallel.parameters(), spec, settings, world.device)
    tokens = torch.randint(0, config.vocab_size, (batch, LENGTH))

    def step():
        began = time.perf_counter()
        optimizer.zero_grad()
        with parallel.accumulate(last=True):
            (parallel.module(tokens, labels=tokens) / tokens.numel()).backward()
        parallel.reduce_gradients()
        world.all_reduce_sum(parallel.gradient_squares())
        optimizer.step()
        return time.perf_counter() - began

    return step


def overhead_of_fsdp():
    world = start_world()
    steps = {strategy: make_step(SHAPE, world, strategy, BATCH) for strategy in ("none", "fsdp")}
    times = {strategy: [] for strategy in steps}
    for _ in range(ROUNDS + 1):
        for strategy, step in steps.items():
            times[strategy].append(step())
    ratios = [fsdp / none for none, fsdp in zip(times["none"][1:], times["fsdp"][1:])]
    print(
        f"one process, d_model {SHAPE.d_model}, {SHAPE.n_layer} layers, {BATCH} x {LENGTH} tokens"
    )
    for strategy, values in times.items():
        print(f"  {strategy:<6}{statistics.median(values[1:]):>8.3f} s per step")
    print(
        f"  fsdp takes {statistics.median(ratios):.3f} times as long "
        f"({min(ratios):.3f} to {max(ratios):.3f}; wanted: below 1.05)\n"
    )
    world.close()


def worker():
    """One rank of the second part: prints tokens/s of the whole world."""
    cpp.tune_process("cpu")
    world = start_world()
    step = make_step(SHAPE, world, "fsdp" if world.size > 1 else "none", BATCH // world.size)
    seconds = [step() for _ in range(ROUNDS + 1)][1:]
    if world.rank == 0:
        print(BATCH * LENGTH / statistics.median(seconds))
    del step
    world.close()


def processes():
    cores = len(os.sched_getaffinity(0))
    print(f"{'processes':<12}{'threads each':>14}{'tokens/s':>12}")
    for count in (1, 2):
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={count}",
        ]
        done = subprocess.run(
            [*torchrun, "-m", "benchmarks.scaling", "worker"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": str(max(1, cores // count))},
        )
        print(f"{count:<12}{max(1, cores // count):>14}{float(done.stdout):>12,.0f}")
    print()


def traffic(config, ranks):
    """(bytes gathered, bytes reduced) per rank and step: what it receives of weights, what it sends of gradients.

    Rows of a parameter are dealt out evenly, so the last rank's share is padded. A block is gathered for the forward
    and again for the backward pass, embedding and output layer once, since they stay. The fp32 parameters are
    all-reduced, in a ring.
    """
    gathered = reduced = 0
    for name, parameter in parameters(config).items():
        elements, rows = parameter.size, parameter.shape[0]
        if parameter.fp32:
            reduced += 2 * (ranks - 1) * elements * 4 / ranks
            continue
        share = -(-rows // ranks) * elements // rows
        gathered += (2 if name.startswith("backbone.layers.") else 1) * (ranks - 1) * share * 2
        reduced += (ranks - 1) * share * 4
    return gathered, reduced


def least(config, ranks):
    elements = parameter_count(config) * (ranks - 1) / ranks
    return 2 * 2 * elements, 4 * elements


def counted(config, ranks):
    """The same, counted while FSDP trains one step of a small model as rank 0 of a make-believe world of `ranks`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    world = World(0, ranks, 0, ranks, torch.device("cpu"))
    parallel = build(config, world, "fsdp", torch.bfloat16)
    tokens = torch.randint(0, config.vocab_size, (1, 16))
    with Counter(ranks) as counter:
        with parallel.accumulate(last=True):
            parallel.module(tokens, labels=tokens).backward()
        parallel.reduce_gradients()
    dist.destroy_process_group()
    return counter.gathered, counter.reduced


class Counter(TorchDispatchMode):
    """Adds up the bytes of the collectives that pass by, for a ring of `ranks`."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks, self.gathered, self.reduced = ranks, 0.0, 0.0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        name = function.overloadpacket.__name__
        if name == "_allgather_base_":
            self.gathered += (self.ranks - 1) * bytes_of(arguments[1])
        elif name == "_reduce_scatter_base_":
            self.reduced += (self.ranks - 1) * bytes_of(arguments[0])
        elif name == "allreduce_":
            self.reduced += sum(
                2 * (self.ranks - 1) * bytes_of(tensor) / self.ranks for tensor in arguments[0]
            )
        return function(*arguments, **(named or {}))


def bytes_of(tensor):
    return tensor.numel() * tensor.element_size()


def main():
    cpp.tune_process("cpu")
    overhead_of_fsdp()
    processes()
    small = ModelConfig(
        d_model=72,
        n_layer=3,
        layers="mamba1,mamba2,attention+mlp",
        headdim=16,
        d_intermediate=100,
        vocab_size=1000,
        n_head=4,
        n_kv_head=2,
    )
    seen, expected = counted(small, RANKS), traffic(small, RANKS)
    print(
        f"per rank of {RANKS} and step, MB; counted on a small model {seen[0] / 1e6:.4f} and {seen[1] / 1e6:.4f}, "
        f"by shapes {expected[0] / 1e6:.4f} and {expected[1] / 1e6:.4f}"
    )
    assert seen == expected, "the count by shapes is not what FSDP does"
    print(
        f"{'preset':<16}{'gathered':>12}{'least':>12}{'reduced':>12}{'least':>12}{'in all / least':>16}"
        "   (wanted: below 1.02)"
    )
    for name in PRESETS:
        config = ModelConfig(**preset(name))
        ours, floor = traffic(config, RANKS), least(config, RANKS)
        print(
            f"{name:<16}{ours[0] / 1e6:>12,.1f}{floor[0] / 1e6:>12,.1f}{ours[1] / 1e6:>12,.1f}"
            f"{floor[1] / 1e6:>12,.1f}{sum(ours) / sum(floor):>16.4f}"
        )


if __name__ == "__main__":
    worker() if sys.argv[1:] == ["worker"] else main()
