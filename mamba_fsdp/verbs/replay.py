"""python -m mamba_fsdp replay RUN [--from=STEP] [--steps=N]

Check that a run was computed correctly. Replay repeats steps of the run from
one of its checkpoints. It compares the loss and the gradient norm of each step,
and the next checkpoint, bit for bit with the records of the run. On another
device, stack or number of ranks, results can differ in the last bits, so
it compares with a tolerance. Nothing is written into RUN; the run can train at
the same time. To use all ranks, run ./1.train.sbatch replay RUN, or the same
with sbatch, as for a training.

Exit codes: 0 the steps are reproduced, 3 a step differs.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from mamba_fsdp.fields import setting
from mamba_fsdp.launch.machine import set_up_rank_signals
from mamba_fsdp.run.names import START_VARIABLE
from mamba_fsdp.run.records import write_status

OTHER_RANKS_DELAY = 60.0


@dataclass
class Options:
    from_: int = setting(-1, at_least=-1)
    """Step of the checkpoint to start from. -1: the second newest checkpoint."""
    steps: int = setting(0, at_least=0)
    """Number of steps. 0: up to the next checkpoint, at most 200. It stops earlier at a restart of the run."""


def main(run: str, options: Options) -> None:
    set_up_rank_signals()
    from mamba_fsdp.trainer.replay import DifferenceError, replay

    is_first = os.environ.get("RANK", "0") == "0"
    try:
        replay(Path(run), options.from_, options.steps)
    except DifferenceError:
        # All ranks find the difference. Rank 0 reports it and exits. Torchrun then ends the other ranks.
        if not is_first:
            time.sleep(OTHER_RANKS_DELAY)
        raise
    if is_first and START_VARIABLE in os.environ:  # the launcher reads the status
        write_status(Path(os.environ[START_VARIABLE]).parents[1], "finished", 0)
