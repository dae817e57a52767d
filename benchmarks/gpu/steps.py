"""Where the time of our step goes: its kernels and the gaps between them, and what a checkpoint costs it."""

import statistics
import time

import torch

from benchmarks.gpu import models
from config.model_config import ModelConfig
from config.presets import preset
from config.train_config import ParallelConfig
from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.model.init import initial_value
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.parallel.world import World

TINY = dict(layers="mamba1", d_model=32, n_layer=2, vocab_size=250)
TOP = 25  # kernels in the table


def our_step(name, rehearse, device):
    """(parallel, optimizer, a step on made-up tokens) as training.py takes it."""
    config = ModelConfig(**(TINY if rehearse else preset(name)))
    weights = {
        each: initial_value(each, described, 0) for each, described in parameters(config).items()
    }
    parallel, optimizer, _, step = models.our_parts(config, weights, device, ParallelConfig())
    shape = (1, 17) if rehearse else (8, 2049)
    tokens = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(
        device
    )
    return parallel, optimizer, lambda: step(tokens)


def trace(device, rehearse, out, keep, name):
    """The kernels of three steps by time, the share in which none ran, and the trace itself as out/NAME.json.gz."""
    _, _, step = our_step(name, rehearse, device)
    on_gpu = device.type == "cuda"
    for _ in range(3):
        step()
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * on_gpu
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(3):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    profile.export_chrome_trace(str(out / f"trace-{name}.json.gz"))
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == wanted and "#" not in event.name
    )  # Optimizer.step#...: no kernel
    wall = (max(end for _, end, _ in spans) - spans[0][0]) or 1
    busy, reached, gaps = 0, spans[0][0], []
    for start, end, _ in spans:
        if start > reached:
            gaps.append(start - reached)
        busy += max(0, end - max(start, reached))
        reached = max(reached, end)
    rows = [
        {
            "kernel": "(all)",
            "ms per step": f"{wall / 3e3:.3f}",
            "share": "100%",
            "calls per step": len(spans) // 3,
        },
        {
            "kernel": "(nothing runs)",
            "ms per step": f"{(wall - busy) / 3e3:.3f}",
            "share": f"{1 - busy / wall:.1%}",
            "calls per step": len(gaps) // 3,
            "longest ms": f"{max(gaps, default=0) / 1e3:.3f}",
        },
    ]
    times: dict[str, list[float]] = {}
    for start, end, kernel in spans:
        times.setdefault(kernel, []).append(end - start)
    for kernel, taken in sorted(times.items(), key=lambda item: -sum(item[1]))[:TOP]:
        rows.append(
            {
                "kernel": kernel[:90],
                "ms per step": f"{sum(taken) / 3e3:.3f}",
                "share": f"{sum(taken) / wall:.1%}",
                "calls per step": f"{len(taken) / 3:g}",
                "longest ms": f"{max(taken) / 1e3:.3f}",
            }
        )
    keep(rows)


def checkpoint(device, rehearse, scratch, keep, name):
    """How long a save holds the steps up, synchronous and in the background, and how the steps beside it slow down."""
    parallel, optimizer, step = our_step(name, rehearse, device)
    rows = []

    def seconds(call, *given):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call(*given)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    usual = statistics.median([seconds(step) for _ in range(5)][2:])
    for asynchronous in (False, True):
        saver = Checkpointer(
            scratch / f"checkpoint-{asynchronous}",
            World.alone(device=device),
            keep=1,
            asynchronous=asynchronous,
            report=lambda line: None,
        )
        optimizer.register_step_pre_hook(lambda *_, saver=saver: saver.wait_for_copies())
        shards = parallel.shards(optimizer)
        held_up, beside = seconds(saver.save, 1, shards, {}), []
        began = time.perf_counter()
        while saver.is_writing():
            beside.append(seconds(step))
        written = time.perf_counter() - began
        rows.append(
            {
                "save": "in the background" if asynchronous else "synchronous",
                "GB": f"{sum(shard.data.nbytes for shard in shards) / 1e9:.2f}",
                "held up s": f"{held_up:.3f}",
                "then written in s": f"{written:.3f}",
                "usual step s": f"{usual:.4f}",
                "steps beside it s": f"{statistics.median(beside):.4f}" if beside else "-",
                "commit s": f"{seconds(saver.wait):.3f}",
            }
        )
        keep(rows)
