"""Guards one node of a job: python3 node_guard.py START ADDRESS PORT JOB ...

A step of each job runs this program, the guard, on every node, outside any container. Each guard
keeps a TCP connection to the job's program (node_watch.py), so that each side notices if the other
host is lost. If the host of the job's program is lost, the guards queue the job again. A guard
removes the containers of ended jobs when it starts. Before it exits, it removes the containers and
temporary folders that this start of the job has left on its node.

START: this start of the job, such as 77.0. ADDRESS, PORT: where the job's program listens. JOB:
another running job of this user; its containers are kept.

Pyxis keeps a named container on the node's disk, or in its memory, until it is removed, unless
Pyxis' container_scope is `job`.

This module runs on the cluster's own Python; host.py describes the restrictions.
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
from mamba_fsdp.launch.containers import CONTAINER_PREFIX  # noqa: E402
from mamba_fsdp.launch.host import command_output  # noqa: E402
from mamba_fsdp.launch.node_watch import ALL_JOBS, REMOVE, TOKEN, enable_keepalive  # noqa: E402

PYXIS_PREFIX = "pyxis_" + CONTAINER_PREFIX  # the prefix of Enroot's names for our containers
# A removal without progress for this time is waiting for storage that does not respond.
REMOVAL_STALL_SECONDS = float(os.environ.get("REMOVAL_SECONDS", 60))
POLL_SECONDS = 0.5
CONNECT_TIMEOUT_SECONDS = float(os.environ.get("GUARD_SECONDS_TO_CONNECT", 60))
NO_CONNECTION = "none"
JOB_ENDING = "job ends"
# Seconds between two queries of a guard whether Slurm has noticed a loss. The number of the guard's node is added.
JOB_POLL_SECONDS = 5.0


class JobEnding(Exception):
    """Raised when Slurm ends this job."""


class Connection:
    """The connection to the job's program. The connection stays open until this process exits.

    ending: GOODBYE at the regular end of the start, NO_CONNECTION if the program could not be
    reached, JOB_ENDING if Slurm ends the job, and "" if the program was killed or its host is lost.
    (A host that shuts down can still close its connections.) to_remove: files and folders to remove
    if the program is killed.
    """

    def __init__(self) -> None:
        self.ending = ""
        self.to_remove: List[str] = []

    def wait(self, address: str, port: int) -> None:
        """Connects and waits until the connection ends. If the program can't be reached, waits for
        EOF on stdin instead.
        """
        try:
            self.server = server = _connect(address, port)
        except OSError:
            sys.stdin.read()
            self.ending = NO_CONNECTION
            return
        # An error does not show whether the program or its host is lost.
        with contextlib.suppress(OSError):
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
    """Guards the node during one start of the job."""
    signal.signal(signal.SIGTERM, _end)
    connection = Connection()
    try:
        for container in list_containers():
            owner = container[len(PYXIS_PREFIX) :]
            number = owner.split(".")[0]
            is_used = ALL_JOBS in others or owner == start or owner in others or number in others
            if not is_used:
                remove_container(container)
        connection.wait(address, int(port))
    except JobEnding:
        connection.ending = JOB_ENDING
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not connection.ending:
        requeue_after_node_loss()
        remove_files_of_killed_job(connection.to_remove)
    own = PYXIS_PREFIX + start
    if own in list_containers():
        # Ranks that are still writing a checkpoint need the files of the container.
        while list_container_processes(os.environ.get("SLURM_JOB_ID", "")):
            time.sleep(POLL_SECONDS)
        remove_container(own)
    remove_scratch()


def _end(number: int, frame: Optional[FrameType]) -> NoReturn:
    raise JobEnding


def _connect(address: str, port: int) -> socket.socket:
    end = time.monotonic() + CONNECT_TIMEOUT_SECONDS
    while True:
        try:
            server = socket.create_connection((address, port), timeout=10)
            server.settimeout(None)
            enable_keepalive(server)
            return server
        except OSError:  # the cause can be transient, such as an overloaded name server
            if time.monotonic() > end:
                raise
            time.sleep(1)


# ------------------------------------------------------------------------------------------------ a lost first node


def requeue_after_node_loss() -> None:
    """Queues the job again once Slurm has removed the lost host of its script.

    Returns without doing so as soon as the job is not running any more, for example because its
    script has ended.

    Under sbatch --no-kill, the job would otherwise stay RUNNING without a script until its time
    limit. The job must not be queued again before Slurm has noticed the loss, because Slurm 22.05
    would then never start it (BadConstraints). Guards with higher node numbers query Slurm less
    often, to limit the load and to avoid simultaneous requests.
    """
    job = slurm.this_job()
    pause = 1.0  # the script has ended by then if its host is not lost
    while True:
        time.sleep(pause)
        if slurm.query_state(job) != "RUNNING":
            return
        held = command_output("squeue", "--noheader", "--jobs=" + job.name, "--format=%N").strip()
        if held and job.nodes[0] not in slurm.host_names(held):
            slurm.requeue_job(job, [job.nodes[0]])
            return
        pause = JOB_POLL_SECONDS + int(os.environ.get("SLURM_NODEID", 1))


# ------------------------------------------------------------------------------------------------ a killed program


def remove_files_of_killed_job(paths: List[str]) -> None:
    """Removes the files of the job's program if SIGKILL has ended it.

    A job that Slurm queues again keeps them for its next start.
    """
    shown = command_output("scontrol", "show", "job", os.environ.get("SLURM_JOB_ID", ""))
    if re.search(r"\bExitCode=0:%d\b" % signal.SIGKILL, shown):
        for path in paths:
            remove_path(path)


def remove_path(path: str) -> None:
    """Removes a file, or a folder and then its parent if that is empty."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(path))
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_scratch() -> None:
    """Removes the temporary folders of this user's launchers that were killed."""
    pattern = os.path.join(glob.escape(tempfile.gettempdir()), "mamba-train-*-*")
    for folder in glob.glob(pattern):
        pid = os.path.basename(folder).split("-")[2]
        is_own = os.stat(folder).st_uid == os.getuid()
        if is_own and not os.path.exists("/proc/" + pid):
            shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ containers


def list_containers() -> List[str]:
    """Returns the names of the launcher's containers on this node."""
    return [
        name for name in command_output("enroot", "list").split() if name.startswith(PYXIS_PREFIX)
    ]


def list_container_processes(job: str) -> List[int]:
    """Returns the processes of a job that run in containers, recognised by their mount namespace."""
    own = os.readlink("/proc/self/ns/mnt")
    mark = f"SLURM_JOB_ID={job}".encode()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            is_inside = os.readlink(f"/proc/{pid}/ns/mnt") != own
            with open(f"/proc/{pid}/environ", "rb") as environ:
                if is_inside and mark in environ.read().split(b"\0"):
                    found.append(int(pid))
        except OSError:  # the process has ended, or belongs to another user
            continue
    return found


def remove_container(container: str) -> None:
    """Removes a container from this node's disk. Gives up if the removal makes no progress."""
    removal = subprocess.Popen(
        ["enroot", "remove", "-f", container],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    before = ""
    since = time.monotonic()
    while removal.poll() is None:
        time.sleep(POLL_SECONDS)
        now = read_session_progress(removal.pid)
        if now != before:
            before = now
            since = time.monotonic()
        elif time.monotonic() - since > REMOVAL_STALL_SECONDS:
            os.killpg(removal.pid, signal.SIGKILL)
            return


def read_session_progress(session: int) -> str:
    """Returns a text that changes when a process of the session makes progress, such as its CPU time."""
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
