"""The step of a job that removes what its containers leave on the nodes, by keeper.py. For the cluster's own Python,
see host.py."""

import contextlib
import os
import subprocess
import sys
from typing import Callable, Iterator

from mamba_fsdp.launch import slurm
from mamba_fsdp.launch.host import PROJECT

KEEPER = os.path.join(PROJECT, "mamba_fsdp", "launch", "keeper.py")
STATES = "RUNNING,SUSPENDED,STOPPED,COMPLETING"  # of jobs that may still use their containers
MOST_SECONDS = 3600.0  # for a removal; a node that makes no progress ends earlier by itself


@contextlib.contextmanager
def keeper(
    job: slurm.Job, image: str, seconds: Callable[[], float] = lambda: MOST_SECONDS
) -> Iterator[None]:
    """Has keeper.py wait on all nodes for the block's end, or the job's: then it removes what this start has unpacked.

    seconds: returns how long the block's end may wait for that. Without an image, nothing is unpacked.
    """
    others = slurm.jobs_of_this_user(STATES) if image else None
    if others is None:  # a busy controller; the next start removes it
        yield
        return
    others.discard(job.number)
    command = [*slurm.beside_all(job), sys.executable, "-I", KEEPER, job.start, *sorted(others)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        assert process.stdin
        with contextlib.suppress(OSError):
            process.stdin.close()  # of which every keeper hears
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds())
