"""Starts a guard on each node of a job, node_guard.py, and watches the nodes by them. For the cluster's own Python, see
host.py."""

import contextlib
import os
import subprocess
import sys
import time
from typing import Callable, Iterator

from mamba_fsdp.launch import slurm
from mamba_fsdp.launch.host import PROJECT
from mamba_fsdp.launch.node_watch import ALL_JOBS, TOKEN, NodeWatch

GUARD = os.path.join(PROJECT, "mamba_fsdp", "launch", "node_guard.py")
STATES = "RUNNING,SUSPENDED,STOPPED,COMPLETING"  # of jobs that may still use their containers
SECONDS_BETWEEN_LOOKS = 0.1
MAX_REMOVAL_SECONDS = 3600.0  # a node on which a removal makes no progress ends earlier by itself


def ignore_loss(node: str) -> None:
    """Does nothing: Slurm ends a job that has lost its only node."""


@contextlib.contextmanager
def guarded(
    job: slurm.Job,
    image: str,
    on_loss: Callable[[str], None] = ignore_loss,
    seconds: Callable[[], float] = lambda: MAX_REMOVAL_SECONDS,
) -> Iterator[NodeWatch]:
    """Returns a context manager that yields the NodeWatch of the job's nodes. At the end of the block, or of the job, the
    guards remove what this start has left on the nodes.

    on_loss: is called in a thread with each node that is lost. seconds: returns how long the end of the block may wait
    for the guards. Without an image, there are no containers to remove.
    """
    others = {ALL_JOBS}
    if image:
        others = slurm.jobs_of_this_user(STATES) or {ALL_JOBS}
    others.discard(job.number)
    watch = NodeWatch(job.nodes, on_loss)
    os.environ[TOKEN] = watch.token
    step = [*slurm.on_hosts(job.nodes), "--no-kill", "--job-name=" + slurm.GUARD_STEP]
    command = [*step, sys.executable, "-I", GUARD, job.start, *watch.address, *sorted(others)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
        assert process.stdin
        with contextlib.suppress(OSError):
            process.stdin.close()  # for guards without a connection
        end = time.monotonic() + seconds()
        while process.poll() is None and time.monotonic() < end:
            if watch.lost and watch.is_alone():
                process.kill()  # srun would wait for the lost node
            time.sleep(SECONDS_BETWEEN_LOOKS)
