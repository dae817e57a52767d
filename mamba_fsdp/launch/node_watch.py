"""Starts a guard (node_guard.py) on each node of a job, and detects within 20 seconds that a node
is lost.

Each guard keeps a TCP connection to this process, and the kernels of both hosts answer the
keep-alive probes. Therefore a stopped process, a suspended job, a slow file system or a long save
does not count as a loss, no clocks are compared, and the traffic is proportional to the number of
nodes. A connection that ends does not count as a loss either, unless two attempts to connect to the
node fail.

This module runs on the cluster's own Python; host.py describes the restrictions.
"""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from typing import Callable, Dict, Iterator, List, Set

from mamba_fsdp.launch import slurm
from mamba_fsdp.launch.host import PROJECT

GUARD = os.path.join(PROJECT, "mamba_fsdp", "launch", "node_guard.py")
# The states of jobs that can still use their containers.
CONTAINER_JOB_STATES = "RUNNING,SUSPENDED,STOPPED,COMPLETING"
POLL_SECONDS = 0.1
MAX_REMOVAL_SECONDS = 3600.0  # guards give up earlier if a removal makes no progress
ALL_JOBS = "all"  # argument of a guard if Slurm did not list the running jobs: keep all containers
TOKEN = "MAMBA_FSDP_GUARD_TOKEN"  # environment variable: the secret that a guard sends first
# Messages to a guard. REMOVE is followed by a path to remove if this process is killed.
GOODBYE = "over"  # this start of the job has ended
REMOVE = "remove"
# A host counts as silent after KEEPALIVE_IDLE + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL = 11 s.
KEEPALIVE_IDLE = 3
KEEPALIVE_INTERVAL = 2
KEEPALIVE_PROBES = 4
REACHABLE_TIMEOUT_SECONDS = 2.0  # timeout of one attempt to connect to a node
MAX_CONNECT_ATTEMPTS = 2
RECHECK_SECONDS = 5.0  # interval of the checks of a node that responds although its guard has ended
GUARD_START_SECONDS = 30.0  # time limit for guards to connect after their step has started


class NodeWatch:
    """Watches the nodes of a job.

    lost: for each lost node, the time at which it was last known to be alive (seconds since the
    epoch).
    """

    def __init__(self, nodes: List[str], on_loss: Callable[[str], None]) -> None:
        """on_loss: called in a thread, once for each lost node."""
        self.nodes = nodes
        self.on_loss = on_loss
        self.lost: Dict[str, float] = {}
        self.is_over = False
        self.connected: Dict[str, socket.socket] = {}
        self.addresses: Dict[str, str] = {}  # {node: IP address from which its guard has connected}
        # Nodes without a running guard that have not responded since the guard has ended.
        self.suspects: Set[str] = set()
        self.lock = threading.Lock()
        self.to_remove: List[str] = []
        self.port = slurm.slurmd_port()
        self.token = secrets.token_hex(16)
        self.server = socket.socket()
        self.server.bind(("", 0))
        self.server.listen(len(nodes) + 16)

    @property
    def address(self) -> List[str]:
        """The host name and the port that guards connect to."""
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        return [host, str(self.server.getsockname()[1])]

    def start(self) -> None:
        """Starts to accept connections of guards."""
        self._start_thread(self._accept)
        self._start_thread(self._await_guards)

    def stop(self) -> None:
        """Notifies the guards, including those that connect later, that this start of the job has
        ended.

        Each guard closes its connection after it has cleaned up its node.
        """
        self.is_over = True
        self._broadcast(GOODBYE)

    def all_guards_ended(self) -> bool:
        """Returns whether the guards of all nodes that are not lost have connected and ended."""
        with self.lock:
            return not self.connected and not self.nodes_without_guard()

    def nodes_without_guard(self) -> List[str]:
        """Returns the nodes that are not lost and from which no guard has ever connected."""
        return [node for node in self.nodes if node not in self.addresses and node not in self.lost]

    def remove_if_killed(self, path: str) -> None:
        """Makes the first node's guard remove a file or folder if SIGKILL ends this process."""
        self.to_remove.append(path)
        self._broadcast(f"{REMOVE} {path}", self.nodes[:1])

    def wait_for_confirmations(self) -> None:
        """Waits until each node without a running guard is known to be alive or lost."""
        while self.suspects:
            time.sleep(0.1)

    def _broadcast(self, message: str, nodes: "List[str] | None" = None) -> None:
        with self.lock:
            for node, guard in self.connected.items():
                if nodes is None or node in nodes:
                    _send(guard, message)

    def _start_thread(self, work: Callable[..., None], *inputs: object) -> None:
        threading.Thread(target=work, args=inputs, daemon=True).start()

    def _accept(self) -> None:
        while True:
            guard, _ = self.server.accept()
            self._start_thread(self._serve_guard, guard)

    def _serve_guard(self, guard: socket.socket) -> None:
        """Waits for the end of a guard's connection, and then checks whether its node is lost."""
        enable_keepalive(guard)
        guard.settimeout(GUARD_START_SECONDS)
        try:
            token, _, node = guard.makefile().readline().rstrip("\n").partition(" ")
        except OSError:
            return
        if token != self.token or node not in self.nodes:
            guard.close()
            return
        guard.settimeout(None)
        with self.lock:
            self.connected[node] = guard
            self.addresses[node] = guard.getpeername()[0]
            if node == self.nodes[0]:
                for path in self.to_remove:
                    _send(guard, f"{REMOVE} {path}")
            if self.is_over:
                _send(guard, GOODBYE)
        silent_for = 0.0
        try:
            guard.recv(1)  # returns when the guard exits
        except ConnectionError:
            pass
        except OSError:  # the keep-alive probes were not answered
            silent_for = KEEPALIVE_IDLE + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL
        with self.lock:
            self.connected.pop(node, None)
        self._confirm_loss(node, time.time() - silent_for)

    def responds(self, node: str) -> bool:
        """Returns whether a node responds to an attempt to connect."""
        return is_reachable(self.addresses.get(node, node), self.port)

    def _await_guards(self) -> None:
        time.sleep(GUARD_START_SECONDS)
        for node in self.nodes_without_guard():
            self._start_thread(self._confirm_loss, node, time.time())

    def _confirm_loss(self, node: str, last_seen: float) -> None:
        """Checks the node until it is lost or this start has ended, and calls on_loss if it is lost.

        A guard that was killed does not count as a loss: only a node that does not respond does.
        last_seen: when the node was last known to be alive, in seconds since the epoch.
        """
        failed = 0
        self.suspects.add(node)
        while not self.is_over and failed < MAX_CONNECT_ATTEMPTS:
            if self.responds(node):
                failed = 0
                self.suspects.discard(node)
                time.sleep(RECHECK_SECONDS)
                last_seen = time.time()
            else:
                failed += 1
        if not self.is_over and node not in self.lost:
            self.lost[node] = last_seen
            self.on_loss(node)
        self.suspects.discard(node)


def _send(guard: socket.socket, message: str) -> None:
    try:
        guard.sendall((message + "\n").encode())
    except OSError:  # the connection has ended; _serve_guard notices that
        pass


def is_reachable(node: str, port: int) -> bool:
    """Returns whether a node's kernel responds to an attempt to connect. A refused connection is a
    response.
    """
    try:
        socket.create_connection((node, port), timeout=REACHABLE_TIMEOUT_SECONDS).close()
    except (ConnectionRefusedError, socket.gaierror):
        # A failed look-up of the name does not count as a loss either, because the cause can be the
        # name server.
        return True
    except OSError:
        return False
    return True


def enable_keepalive(connection: socket.socket) -> None:
    """Makes the kernel end the connection with an error once the other host has been silent for 11 s."""
    silence = KEEPALIVE_IDLE + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silence)


@contextlib.contextmanager
def guard_nodes(
    job: slurm.Job,
    image: str,
    on_loss: Callable[[str], None] = lambda node: None,
    seconds: Callable[[], float] = lambda: MAX_REMOVAL_SECONDS,
) -> Iterator[NodeWatch]:
    """Guards the job's nodes during a `with` block, and yields their NodeWatch.

    At the end of the block or of the job, the guards remove the files that this start has left on
    the nodes.

    image: "" if the job uses no containers. on_loss: called in a thread with the name of each lost
    node. By default it does nothing, because Slurm itself ends a job that has lost its only node.
    seconds: returns how long the end of the block waits for the guards.
    """
    others = {ALL_JOBS}
    if image:
        others = slurm.jobs_of_this_user(CONTAINER_JOB_STATES) or {ALL_JOBS}
    others.discard(job.number)
    watch = NodeWatch(job.nodes, on_loss)
    os.environ[TOKEN] = watch.token
    step = [*slurm.srun_without_gpus(job.nodes), "--no-kill", "--job-name=" + slurm.GUARD_STEP]
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
            process.stdin.close()  # guards without a connection exit at the end of their stdin
        end = time.monotonic() + seconds()
        while process.poll() is None and time.monotonic() < end:
            if watch.lost and watch.all_guards_ended():
                process.kill()  # because srun would wait for the lost node
            time.sleep(POLL_SECONDS)
