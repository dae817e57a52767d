"""A torch profile of a few steps, in the Chrome trace format, for Perfetto or chrome://tracing."""

from pathlib import Path

import torch

from mamba_fsdp.run_layout import PROFILE


def make_profiler(run_folder: Path, rank: int) -> torch.profiler.profile:
    """A context manager; call `step` after each optimiser step. Writes profile/rank_R.json into the run folder: steps 5
    to 7 of this start, or those of them that a shorter run has."""
    def write(profile: torch.profiler.profile) -> None:
        path = run_folder / PROFILE / f"rank_{rank}.json"
        path.parent.mkdir(exist_ok=True)
        profile.export_chrome_trace(str(path))

    # The first steps compile kernels and fill caches.
    steps = torch.profiler.schedule(wait=3, warmup=1, active=3, repeat=1)
    return torch.profiler.profile(schedule=steps, on_trace_ready=write, record_shapes=True)
