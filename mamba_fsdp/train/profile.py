"""A torch profile of a few steps, in the Chrome trace format, for Perfetto or chrome://tracing."""

from pathlib import Path

import torch

from mamba_fsdp.run_layout import PROFILE

FIRST, COUNT = 5, 3  # the first steps compile kernels and fill caches


class Profiler:
    """Call `step` after each optimiser step; writes profile/rank_R.json into the run folder after steps 5 to 7 of this
    start."""

    def __init__(self, run_folder: Path, rank: int, step: int) -> None:
        self.path = run_folder / PROFILE / f"rank_{rank}.json"
        self.first = step + FIRST
        self.profile: torch.profiler.profile | None = None

    def step(self, step: int) -> None:
        if step == self.first - 1:
            self.profile = torch.profiler.profile(record_shapes=True)
            self.profile.start()
        elif step == self.first + COUNT - 1:
            self.close()

    def close(self) -> None:
        """Write what there is: a run may end before the last of these steps."""
        if self.profile:
            self.profile.stop()
            self.path.parent.mkdir(exist_ok=True)
            self.profile.export_chrome_trace(str(self.path))
            self.profile = None
