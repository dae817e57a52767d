"""python -m mamba_fsdp replay RUN [--from=STEP] [--steps=N]

Was it computed right? Compute steps of a run again, from one of its
checkpoints, and compare the loss and the gradient norm of each step, and the
next checkpoint, bit for bit with what the run recorded. On another device,
stack or number of ranks, where bits may differ, it compares with a tolerance.
Nothing is written into RUN, which may train meanwhile. All ranks of a run take
part with ./1.train.sbatch replay RUN, or sbatch, as in a training.

Exit codes: 0 the steps repeat, 3 one differs.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from mamba_fsdp.fields import setting
from mamba_fsdp.launch.machine import set_up_rank_signals
from mamba_fsdp.run.names import START_VARIABLE
from mamba_fsdp.run.records import write_status

SECONDS_BEHIND = 60.0


@dataclass
class Options:
    from_: int = setting(-1, at_least=-1)
    """The step of the checkpoint to start from. -1: the newest but one."""
    steps: int = setting(0, at_least=0)
    """How many steps. 0: up to the next checkpoint, at most 200. Fewer if the run was started again in between."""


def main(run: str, options: Options) -> None:
    set_up_rank_signals()
    from mamba_fsdp.trainer.replay import DifferenceError, replay

    is_first = os.environ.get("RANK", "0") == "0"
    try:
        replay(Path(run), options.from_, options.steps)
    except DifferenceError:
        if not is_first:  # rank 0 says it, at which torchrun ends the others
            time.sleep(SECONDS_BEHIND)
        raise
    if is_first and START_VARIABLE in os.environ:  # the launcher asks how it ended
        write_status(Path(os.environ[START_VARIABLE]).parents[1], "finished", 0)
