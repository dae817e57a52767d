"""Guards one node of a job: python3 node_guard.py START ADDRESS PORT JOB ...

A step of each job, outside any container, runs this program on every node. It holds a TCP connection to the program of
the job (node_watch.py), by which each side notices that the other's host is lost. If the host of the job's program is
lost, nobody else is left to queue the job again, so this program does so. At the end it removes what the start has left
on its node: containers and folders for temporary files. When it begins it removes the containers of jobs that have ended.

START: of this job, as in 77.0. ADDRESS, PORT: where the job's program listens. JOB: another job of this user that is
running, whose containers stay. For the cluster's own Python, see host.py.

Pyxis keeps a named container on the node's disk, or in its memory, until somebody removes it, unless its
container_scope is `job`.
"""

import contextlib
import glob
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from types import FrameType
from typing import List, NoReturn, Optional

sys.path[0] = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))

from mamba_fsdp.launch import slurm  # noqa: E402
from mamba_fsdp.launch.containers import NAME  # noqa: E402
from mamba_fsdp.launch.host import answer_of  # noqa: E402
from mamba_fsdp.launch.node_watch import ALL_JOBS, REMOVE, TOKEN, keep_alive  # noqa: E402

PREFIX = "pyxis_" + NAME  # as Pyxis names what it unpacks, where it keeps it
# A removal that does nothing for so long waits for storage that no longer answers.
SECONDS_WITHOUT_PROGRESS = float(os.environ.get("REMOVAL_SECONDS", 60))
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_CONNECT = float(os.environ.get("GUARD_SECONDS_TO_CONNECT", 60))
NO_CONNECTION = "none"
JOB_ENDS = "job ends"
SECONDS_BETWEEN_QUESTIONS = (
    5.0  # of the first guard, whether Slurm knows that the first node is lost
)


class JobEnds(Exception):
    """Slurm ends this job."""


class Connection:
    """The connection to the job's program, which stays open until this process exits.

    ending: GOODBYE at the end of the start, NO_CONNECTION if there was none, JOB_ENDS if Slurm ends the job, and "" if the program was killed or its host is
    lost: a host that dies can still end its connections in good order. to_remove: files and folders that a killed program
    leaves."""

    def __init__(self) -> None:
        self.ending = ""
        self.to_remove: List[str] = []

    def hold(self, address: str, port: int) -> None:
        """Returns when the connection ends. Without one, when stdin ends, as Slurm passes it on."""
        try:
            self.server = server = _connect(address, port)
        except OSError:
            sys.stdin.read()
            self.ending = NO_CONNECTION
            return
        with contextlib.suppress(OSError):  # how the connection breaks does not tell why
            node = os.environ["SLURMD_NODENAME"]
            server.sendall("{} {}\n".format(os.environ.get(TOKEN, ""), node).encode())
            for line in server.makefile():
                word, _, path = line.rstrip("\n").partition(" ")
                if word == REMOVE:
                    self.to_remove.append(path)
                else:
                    self.ending = word
                    return


def main(start: str, address: str, port: str, others: List[str]) -> None:
    """Guards the node from the beginning of a start of the job to its end."""
    signal.signal(signal.SIGTERM, _end)
    connection = Connection()
    try:
        for container in unpacked():
            of = container[len(PREFIX) :]
            number = of.split(".")[0]
            is_used = ALL_JOBS in others or of == start or of in others or number in others
            if not is_used:
                remove_container(container)
        connection.hold(address, int(port))
    except JobEnds:
        connection.ending = JOB_ENDS
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not connection.ending:
        queue_job_again()
        remove_leftovers(connection.to_remove)
    own = PREFIX + start
    if own in unpacked():
        await_end_of_container()
        remove_container(own)
    remove_scratch()


def _end(number: int, frame: Optional[FrameType]) -> NoReturn:
    raise JobEnds


def _connect(address: str, port: int) -> socket.socket:
    end = time.monotonic() + SECONDS_TO_CONNECT
    while True:
        try:
            server = socket.create_connection((address, port), timeout=10)
            server.settimeout(None)
            keep_alive(server)
            return server
        except OSError:  # for example a name server that is busy
            if time.monotonic() > end:
                raise
            time.sleep(1)


# ------------------------------------------------------------------------------------------------ a lost first node


def queue_job_again() -> None:
    """Puts the job back into the queue once Slurm has removed the lost host of its script. Returns as soon as the job no
    longer runs, as after the end of its script on a living host.

    Under sbatch --no-kill the job would otherwise be RUNNING without a script until its time limit. A job that is queued
    again before Slurm knows that the host is lost is held for good (BadConstraints, Slurm 22.05). Guards with higher numbers
    ask less often, so that their questions don't add up, and one of them is the first to see it."""
    job = slurm.this_job()
    pause = 1.0  # the script of a living host has ended by then
    while True:
        time.sleep(pause)
        if slurm.state(job) != "RUNNING":
            return
        held = answer_of("squeue", "--noheader", "--jobs=" + job.name, "--format=%N").strip()
        if held and job.nodes[0] not in slurm.host_names(held):
            slurm.queue_again(job, [job.nodes[0]])
            return
        pause = SECONDS_BETWEEN_QUESTIONS + int(os.environ.get("SLURM_NODEID", 1))


# ------------------------------------------------------------------------------------------------ a killed program


def remove_leftovers(paths: List[str]) -> None:
    """Removes what the job's program would have removed, if SIGKILL has ended it. A job that Slurm queues again keeps
    it for its next start."""
    shown = answer_of("scontrol", "show", "job", os.environ.get("SLURM_JOB_ID", ""))
    if re.search(r"\bExitCode=0:%d\b" % signal.SIGKILL, shown):
        for path in paths:
            remove_path(path)


def remove_path(path: str) -> None:
    """Removes a file, or a folder and then the one above it if nothing else is there."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(path))
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_scratch() -> None:
    """Removes the folders of launchers that were killed."""
    pattern = os.path.join(glob.escape(tempfile.gettempdir()), "mamba-train-*-*")
    for folder in glob.glob(pattern):
        pid = os.path.basename(folder).split("-")[2]
        is_own = os.stat(folder).st_uid == os.getuid()
        if is_own and not os.path.exists("/proc/" + pid):
            shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ containers


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


def remove_container(container: str) -> None:
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
    start, address, port = sys.argv[1:4]
    main(start, address, port, sys.argv[4:])
