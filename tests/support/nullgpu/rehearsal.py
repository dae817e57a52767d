"""Goes through the parts of benchmarks.gpu in tiny sizes, in this process: python -m tests.support.nullgpu.rehearsal OUT

Prints their tables. Each is timed once, and compilers' caches stay where they are: as little is compiled as can be.
"""

import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.gpu import __main__ as everything
from benchmarks.gpu import models, runs, values
from mamba_fsdp.trainer import layer_check
from tests.support.forked import Training

PARTS = (
    "run",
    "traces",
    "values",
    "ncu",
    "mamba-1.4b",
    "steps",
)  # which fork before the device is used

if __name__ == "__main__":
    out = Path(sys.argv[1])
    layer_check.TIMED_ROUNDS = models.STEPS = 1
    values.POSITIONS = (608,)
    runs.use_caches = lambda folder: None
    runs.start = lambda words: Training(words, dict(os.environ), True)
    runs.TINY = models.TINY | {"seq_length": 16}
    # A folder that is removed at a process's end would be removed at that of a fork.
    everything.tempfile = SimpleNamespace(TemporaryDirectory=lambda: nullcontext(out))
    torch.cuda.is_available = lambda: True  # by asking, a process loses the right to fork
    torch.compile = partial(torch.compile, backend="eager")
    for part in PARTS:
        everything.measure_part(part, out, True)
        print(everything.take_table(part, out), flush=True)
    print(everything.provenance())
