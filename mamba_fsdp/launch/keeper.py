"""Removes from a node what jobs have unpacked there: python3 keeper.py START JOB ...

Pyxis keeps a named container on the node's disk, or in its memory, for as long as nobody removes it, unless its
container_scope is `job`. So a step of each job, outside the container, runs this program on every node. At first
it removes the containers of jobs that have ended. Then it waits until its stdin ends, as the job's script does, or
until Slurm ends the job, and removes the container of this start once nothing runs in it any longer.

START: of this job, as in 77.0. JOB: another job that runs, whose containers stay. For the cluster's own Python, see
host.py.
"""

import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import List, NoReturn, Optional

sys.path[0] = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))

from mamba_fsdp.launch.containers import NAME
from mamba_fsdp.launch.host import answer_of

PREFIX = "pyxis_" + NAME  # as Pyxis names what it unpacks, where it keeps it
# A removal that does nothing for so long waits for storage that no longer answers.
SECONDS_WITHOUT_PROGRESS = float(os.environ.get("REMOVAL_SECONDS", 60))
SECONDS_BETWEEN_LOOKS = 0.5


class JobEnds(Exception):
    """Slurm ends this job."""


def main(start: str, others: List[str]) -> None:
    """Removes the containers of ended jobs, and at the end of this start its own."""
    signal.signal(signal.SIGTERM, _end)
    try:
        for container in unpacked():
            of = container[len(PREFIX) :]
            number = of.split(".")[0]
            if of != start and of not in others and number not in others:
                remove(container)
        sys.stdin.read()
    except JobEnds:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    own = PREFIX + start
    if own in unpacked():
        await_end_of_container()
        remove(own)


def _end(number: int, frame: Optional[FrameType]) -> NoReturn:
    raise JobEnds


def unpacked() -> List[str]:
    """Returns the names of our containers on this node."""
    return [name for name in answer_of("enroot", "list").split() if name.startswith(PREFIX)]


def await_end_of_container() -> None:
    """Returns when no process of this job runs in a container: ranks that save must keep their files."""
    while containers_processes(os.environ.get("SLURM_JOB_ID", "")):
        time.sleep(SECONDS_BETWEEN_LOOKS)


def containers_processes(job: str) -> List[int]:
    """Returns the processes of a job that see other mounts than this process does, as those in a container."""
    own = os.readlink("/proc/self/ns/mnt")
    mark = f"SLURM_JOB_ID={job}".encode()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            is_inside = os.readlink(f"/proc/{pid}/ns/mnt") != own
            with open(f"/proc/{pid}/environ", "rb") as environ:
                if is_inside and mark in environ.read().split(b"\0"):
                    found.append(int(pid))
        except OSError:  # another user's, or it has ended
            continue
    return found


def remove(container: str) -> None:
    """Removes a container from this node's disk, for as long as the removal makes progress."""
    removal = subprocess.Popen(
        ["enroot", "remove", "-f", container],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    before = ""
    since = time.monotonic()
    while removal.poll() is None:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        now = work_of(removal.pid)
        if now != before:
            before = now
            since = time.monotonic()
        elif time.monotonic() - since > SECONDS_WITHOUT_PROGRESS:
            os.killpg(removal.pid, signal.SIGKILL)
            return


def work_of(session: int) -> str:
    """Returns what the processes of a session have done so far: among it the processor's time of each."""
    lines = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                line = stat.read()
        except OSError:
            continue
        fields = line.rpartition(")")[2].split()
        if fields[3] == str(session):
            lines.append(line)
    return "".join(lines)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
