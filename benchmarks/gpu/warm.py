"""Compiles the kernels of the training steps in models.py in several processes, then tunes the kernels of other libraries in a
single process. Later processes find the compiled kernels and the tuned configurations in Triton's cache.

The models have two layers of full width, because only the second layer gets a residual stream.
"""

import gc
import importlib.util
import itertools
import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.models import MODELS, PRESETS, Row, made_up_tokens, settings_of
from benchmarks.measure import in_processes
from mamba_fsdp.errors import first_line
from mamba_fsdp.model.spec import parameters

PROCESSES = 8
# This environment variable makes Triton keep tuned configurations in its cache.
KEEP_CHOICES = "TRITON_CACHE_AUTOTUNING"
JOBS = list(itertools.product(PRESETS, MODELS))
# The logits of all processes would not fit into memory with the full vocabulary. The tuned kernels do not depend on the
# size of the vocabulary.
SMALL = {"vocab_size": 8192}


def measure(device: torch.device, rehearse: bool) -> Iterator[Row]:
    began = time.perf_counter()
    work = partial(compile_all, device, rehearse, PROCESSES)
    problems: set[str] = set().union(*in_processes(work, range(PROCESSES), PROCESSES))
    row: Row = {"preset": "all", "model": f"all, in {PROCESSES} processes"}
    row["seconds"] = f"{time.perf_counter() - began:.1f}"
    yield row | {"note": "; ".join(sorted(problems))}
    for name, title in JOBS:
        began = time.perf_counter()
        problem = take_step(name, title, device, rehearse, {})
        row = {"preset": name, "model": title, "seconds": f"{time.perf_counter() - began:.1f}"}
        yield row | {"note": problem}


def compile_all(device: torch.device, rehearse: bool, processes: int, number: int) -> set[str]:
    """Takes a step of each model. Each process begins with a different model. Returns the errors."""
    os.environ.pop(
        KEEP_CHOICES, None
    )  # a choice is not kept, because times are wrong while other processes use the GPU
    problems = set()
    with share_of_configs(number, processes):
        for name, title in JOBS[number:] + JOBS[:number]:
            problems.add(take_step(name, title, device, rehearse, SMALL))
    return problems - {""}


def share_of_configs(number: int, processes: int) -> Any:
    """Makes Triton's autotuner try only this process's share of the configurations of each kernel inside the block."""
    if not importlib.util.find_spec("triton"):
        return mock.MagicMock()
    from triton.runtime.autotuner import Autotuner

    whole = Autotuner.prune_configs

    def share(tuner: Any, arguments: dict[str, Any]) -> list[Any]:
        configs = whole(tuner, arguments)
        return configs[number % len(configs) :: processes]

    return mock.patch.object(Autotuner, "prune_configs", share)


def take_step(
    name: str, title: str, device: torch.device, rehearse: bool, sizes: dict[str, int]
) -> str:
    """Takes a step of a model with two layers. Returns the error, or "" if there is none."""
    settings = settings_of(name, rehearse, n_layer=2, **sizes)
    weights = {}
    for parameter, described in parameters(settings.model).items():
        weights[parameter] = torch.zeros(described.shape)
    try:
        build, _ = MODELS[title]
        step = build(settings, device, weights)
        step(made_up_tokens(settings, device))
    except Exception as error:
        return f"{title}: {type(error).__name__}: {first_line(error)}"
    finally:
        gc.collect()
        torch.cuda.empty_cache()  # makes the memory available to other processes
    return ""
