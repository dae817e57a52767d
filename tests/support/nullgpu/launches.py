"""Counts the kernel launches of one block of a model in benchmarks.launches: python -m tests.support.nullgpu.launches
MODEL"""

import sys

from benchmarks.launches import MODELS, SHAPE, counted_step
from mamba_fsdp.settings.resolve import resolve_settings

LAYERS = 8


def count_step(settings, layers):
    step = counted_step(settings, layers)
    step()  # the first step also creates the optimizer's moments
    before = step()
    return step() - before


if __name__ == "__main__":
    settings = resolve_settings(MODELS[sys.argv[1]] | SHAPE)
    difference = count_step(settings, 2 * LAYERS) - count_step(settings, LAYERS)
    print((difference / LAYERS).round().int().tolist())
