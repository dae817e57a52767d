"""Runs the parts of benchmarks.gpu with tiny sizes in this process, and prints their tables.

    python -m tests.support.nullgpu.rehearsal OUT

Each kernel is timed once. The caches of the compilers are kept, so that little has to be compiled.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.gpu import __main__ as everything
from benchmarks.gpu import candidates, models, runs, warm
from mamba_fsdp.trainer import layer_check
from tests.support.forked import Training

# Parts that fork come first, before the device is used.
PARTS = ("run", "traces", "warm", "candidates", "ncu", "mamba-1.4b")

if __name__ == "__main__":
    out = Path(sys.argv[1])
    layer_check.TIMED_ROUNDS = candidates.ROUNDS = 1
    candidates.STEPS = models.Steps(1, 1)
    for title, (build, _) in models.MODELS.items():
        models.MODELS[title] = (build, models.Steps(1, 1))
    candidates.CANDIDATES = {"mamba2-1.3b": ("", "ssd.triton.SWEEP.P=32 norm=reference")}
    candidates.PROCESSES = warm.PROCESSES = 1
    runs.PRESETS = runs.PRESETS[:1]
    runs.use_caches = lambda folder: None
    runs.start = lambda arguments: Training(arguments, dict(os.environ), True)
    runs.TINY = models.TINY | {"layers": "mamba1,mamba2", "seq_length": 16}
    # A folder that is removed at the end of the process would also be removed at the end of a forked process.
    everything.tempfile = SimpleNamespace(TemporaryDirectory=lambda: nullcontext(out))
    # After a call of the real function, a process can't fork any more.
    torch.cuda.is_available = lambda: True
    for part in PARTS:
        everything.measure_part(part, out, True)
        print(everything.take_table(part, out), flush=True)
    print(everything.provenance())
