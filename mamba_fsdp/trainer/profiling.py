"""Profiles a few steps: writes a Chrome trace to the run folder, and prints the operators that take the most time."""

import os
from pathlib import Path

import torch

from mamba_fsdp.data.loader import Loader
from mamba_fsdp.reporting.console import PrintLine
from mamba_fsdp.run.names import PROFILE

DATA = "waiting for data"  # the name of Loader.step in the trace
ROWS = 8  # number of operators in the table
STEPS = 3


def make_profiler(
    run_folder: Path, rank: int, loader: Loader, print_line: PrintLine
) -> torch.profiler.profile:
    """Returns a profiler for steps 5 to 7 of this start.

    It writes the trace profile/rank_<rank>.json for Perfetto or chrome://tracing. On rank 0 it also prints the
    operators that took the most time.
    """

    def write(profile: torch.profiler.profile) -> None:
        path = run_folder / PROFILE / f"rank_{rank}.json"
        path.parent.mkdir(exist_ok=True)
        profile.export_chrome_trace(str(path))
        if rank == 0:
            order = "cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
            table = profile.key_averages().table(
                sort_by=order, row_limit=ROWS, max_name_column_width=40
            )
            print_line(f"profile    {STEPS} steps, sorted by device time:\n{table}")

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise each probe prints a line to stderr
    vars(loader)["step"] = torch.profiler.record_function(DATA)(loader.step)
    # Do not profile the first steps, because they compile kernels and fill caches.
    steps = torch.profiler.schedule(wait=3, warmup=1, active=STEPS, repeat=1)
    return torch.profiler.profile(schedule=steps, on_trace_ready=write, record_shapes=True)
