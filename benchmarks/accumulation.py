"""What it costs to reduce every micro-batch's gradients, and what it saves: `python -m benchmarks.accumulation`.

For 2 and 4 ranks of this machine under FSDP, with 4 micro-batches a step, as by default and with accumulate_unsharded:
MB of gradients that a rank holds between two micro-batches, MB that it sends a step for gradients and receives for
weights (counted in the collectives that FSDP issues), and the seconds of a step, taken in turn. Between the ranks is
this machine's own loopback, over gloo: a real network is slower or faster, and CUDA overlaps it with computing.
"""

import gc
import os
import statistics
import subprocess
import sys
import time

import torch

from benchmarks.scaling import SHAPE, Counter, bytes_of
from config.train_config import ParallelConfig
from mamba_fsdp.model.init import initial_part
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import operator_uses, parameters
from mamba_fsdp.ops import cpp
from mamba_fsdp.ops.backends import resolve_backends
from mamba_fsdp.parallel.model import fill_parts
from mamba_fsdp.parallel.parallelize import parallelize
from mamba_fsdp.parallel.world import start_world

LENGTH, MICRO_BATCHES, ROUNDS = 128, 4, 7
WAYS = {"every micro-batch": False, "accumulate_unsharded": True}


def build(world, unsharded):
    backends = resolve_backends("auto", "cpu", operator_uses(SHAPE, torch.bfloat16)).backends
    with torch.device("meta"):
        model = MambaLM(SHAPE, backends=backends, compute_dtype=torch.bfloat16)
    settings = ParallelConfig(sharding_strategy="fsdp", accumulate_unsharded=unsharded)
    parallel = parallelize(model, settings, world=world, compute_dtype=torch.bfloat16)
    spec = parameters(SHAPE)
    fill_parts(
        parallel.shards(), lambda name, start, stop: initial_part(name, spec[name], 0, start, stop)
    )
    return parallel


def gradients_of_a_step(parallel, tokens, between=lambda: None):
    """Computes them from nothing; `between` is called after each micro-batch but the last."""
    for parameter in parallel.parameters().values():
        parameter.grad = None
    for index in range(MICRO_BATCHES):
        with parallel.accumulate(last=index == MICRO_BATCHES - 1):
            parallel.module(tokens, labels=tokens).backward()
        if index < MICRO_BATCHES - 1:
            between()
    parallel.reduce_gradients()


def waiting(parallel):
    """Bytes of gradients that this rank holds now, whole ones and shares."""
    ours = set(parallel.model.parameters())
    kept = [
        thing
        for thing in gc.get_objects()
        if type(thing).__name__ == "FSDPParam" and thing.sharded_param in ours
    ]
    gradients = [thing.unsharded_accumulated_grad for thing in kept] + [
        parameter.grad for parameter in ours
    ]
    return sum(
        bytes_of(getattr(gradient, "_local_tensor", gradient))
        for gradient in gradients
        if gradient is not None
    )


def worker():
    """One rank: prints, on rank 0, a line for each way: MB waiting, sent, received, seconds of each round."""
    cpp.tune_process("cpu")
    world = start_world()
    models = {way: build(world, unsharded) for way, unsharded in WAYS.items()}
    tokens = torch.randint(
        0, SHAPE.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(world.rank)
    )
    figures = {way: [] for way in WAYS}
    for way, parallel in models.items():
        held = []
        with Counter(world.size) as counter:
            gradients_of_a_step(
                parallel, tokens, lambda here=parallel, held=held: held.append(waiting(here))
            )
        figures[way] = [max(held) / 1e6, counter.reduced / 1e6, counter.gathered / 1e6]
    for _ in range(ROUNDS):
        for way, parallel in models.items():
            world.barrier()
            began = time.perf_counter()
            gradients_of_a_step(parallel, tokens)
            world.barrier()
            figures[way].append(time.perf_counter() - began)
    if world.rank == 0:
        for way in WAYS:
            print(*figures[way])
    del models, parallel
    world.close()


def main():
    size = sum(parameter.size for parameter in parameters(SHAPE).values()) * 4 / 1e6
    print(
        f"a model of {size:.0f} MB in fp32, {MICRO_BATCHES} micro-batches of {LENGTH} tokens a step, bf16\n"
        f"{'ranks':<7}{'reduced':<22}{'MB waiting':>12}{'MB sent':>10}{'MB received':>13}{'s a step':>10}"
    )
    for ranks in (2, 4):
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        done = subprocess.run(
            [*torchrun, "-m", "benchmarks.accumulation", "worker"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        lines = [[float(word) for word in line.split()] for line in done.stdout.splitlines()]
        for way, (most, sent, received, *seconds) in zip(WAYS, lines):
            print(
                f"{ranks:<7}{way:<22}{most:>12.1f}{sent:>10.1f}{received:>13.1f}{statistics.median(seconds):>10.3f}"
            )
        ratios = [each / unsharded for each, unsharded in zip(lines[0][3:], lines[1][3:])]
        print(
            f"       every micro-batch takes {statistics.median(ratios):.2f} times as long "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    worker() if sys.argv[1:] == ["worker"] else main()
