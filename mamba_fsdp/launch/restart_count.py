"""Counts how often in a row a job has started from the same checkpoint.

This module runs on the cluster's own Python; host.py describes the restrictions.
"""

import contextlib
import glob
import os

from mamba_fsdp.launch import slurm
from mamba_fsdp.launch.host import PROJECT

NO_CHECKPOINT = "start"


class RestartCount:
    """The restart count of a job. It is kept in a file, because each start of the job is a new
    process.

    restarts: how often in a row the job has started again from the same checkpoint. newest: the
    newest checkpoint when the most recently counted start began.
    """

    def __init__(self, job: slurm.Job) -> None:
        self.file = os.path.join(PROJECT, "logs", "restarts_" + job.number)
        self.restarts = 0
        self.newest = NO_CHECKPOINT
        self.before = ""  # the newest checkpoint when the previous start of the job began
        if job.restart:
            with contextlib.suppress(OSError, ValueError):
                with open(self.file) as file:
                    count, self.before = file.read().split()
                self.restarts = int(count)
                self.newest = self.before

    def count(self, newest: str) -> None:
        """Counts this start of the job. newest: the newest checkpoint when this start begins."""
        self.restarts = self.restarts + 1 if self.before == newest else 0
        self.newest = newest
        remove_ended_jobs(os.path.dirname(self.file))
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self.file), exist_ok=True)
            with open(self.file, "w") as file:
                file.write(f"{self.restarts} {newest}\n")

    def forget(self) -> None:
        """Removes the file after the last start of the job."""
        with contextlib.suppress(OSError):
            os.unlink(self.file)


def remove_ended_jobs(logs: str) -> None:
    """Removes the restart counts of this user's jobs that were killed and could not remove them."""
    living = slurm.jobs_of_this_user(
        "PENDING,RUNNING,SUSPENDED,STOPPED,COMPLETING,CONFIGURING,REQUEUED"
    )
    if living is None:
        return
    for file in glob.glob(os.path.join(glob.escape(logs), "restarts_*")):
        with contextlib.suppress(OSError):
            is_own = os.stat(file).st_uid == os.getuid()
            if is_own and file.rpartition("_")[2] not in living:
                os.unlink(file)
