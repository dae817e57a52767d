"""Notices within 20 seconds that a node of the job is lost. For the cluster's own Python, see host.py.

The guard on each node (node_guard.py) holds a TCP connection to this process. The kernel of each host answers the other's
keep-alive probes. So a process that is stopped, a suspended job, a slow file system and a long save are not a loss, no
clock is compared, and the traffic grows with the number of nodes. A connection that ends is not a loss either, until
the node has not answered two more attempts to connect to it.
"""

import os
import secrets
import socket
import threading
import time
from typing import Callable, Dict, List, Set

from mamba_fsdp.launch import slurm

ALL_JOBS = "all"  # to a guard: Slurm has not said which jobs of this user are running
TOKEN = "MAMBA_FSDP_GUARD_TOKEN"  # in the environment: what a guard says first
# What this process says to a guard: the start is over; remove this path if this process is killed.
GOODBYE = "over"
REMOVE = "remove"
# A host is silent after KEEPALIVE_IDLE + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL = 11 s.
KEEPALIVE_IDLE = 3
KEEPALIVE_INTERVAL = 2
KEEPALIVE_PROBES = 4
SECONDS_TO_ANSWER = 2.0  # of one attempt to connect to a node
ATTEMPTS = 2
SECONDS_BETWEEN_ATTEMPTS = 5.0  # to a node that answers but whose guard has ended
SECONDS_TO_APPEAR = 30.0  # for a guard, after its step has begun


class NodeWatch:
    """Watches the nodes of a job. lost: when each lost node was last known to be there (seconds since the epoch)."""

    def __init__(self, nodes: List[str], on_loss: Callable[[str], None]) -> None:
        """on_loss: is called in a thread, once with each lost node."""
        self.nodes = nodes
        self.on_loss = on_loss
        self.lost: Dict[str, float] = {}
        self.is_over = False
        self.connected: Dict[str, socket.socket] = {}
        self.addresses: Dict[str, str] = {}  # of the nodes whose guard has appeared
        self.suspects: Set[str] = set()  # nodes whose guard has ended, until they answer
        self.lock = threading.Lock()
        self.to_remove: List[str] = []
        self.port = slurm.slurmd_port()
        self.token = secrets.token_hex(16)
        self.server = socket.socket()
        self.server.bind(("", 0))
        self.server.listen(len(nodes) + 16)

    @property
    def address(self) -> List[str]:
        """Where guards connect: the name of this host, and a port."""
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        return [host, str(self.server.getsockname()[1])]

    def start(self) -> None:
        """Begins to wait for guards."""
        self._in_thread(self._accept)
        self._in_thread(self._await_guards)

    def stop(self) -> None:
        """Tells the guards, also those that connect later, that this start of the job is over. Each ends its connection once
        it has cleaned its node."""
        self.is_over = True
        self._tell(GOODBYE)

    def is_alone(self) -> bool:
        """Returns whether no guard is at work any more."""
        with self.lock:
            return not self.connected and not self.unconnected()

    def unconnected(self) -> List[str]:
        """Returns the nodes that are not lost and from which no guard has connected."""
        return [node for node in self.nodes if node not in self.addresses and node not in self.lost]

    def remove_if_killed(self, path: str) -> None:
        """Has the first node's guard remove a file or folder if SIGKILL ends this process."""
        self.to_remove.append(path)
        self._tell(f"{REMOVE} {path}", self.nodes[:1])

    def settle(self) -> None:
        """Returns once it is known of each node whose guard has ended whether it is lost."""
        while self.suspects:
            time.sleep(0.1)

    def _tell(self, message: str, nodes: "List[str] | None" = None) -> None:
        with self.lock:
            for node, guard in self.connected.items():
                if nodes is None or node in nodes:
                    _send(guard, message)

    def _in_thread(self, work: Callable[..., None], *inputs: object) -> None:
        threading.Thread(target=work, args=inputs, daemon=True).start()

    def _accept(self) -> None:
        while True:
            guard, _ = self.server.accept()
            self._in_thread(self._hold, guard)

    def _hold(self, guard: socket.socket) -> None:
        """Waits for the end of a guard's connection. If its host no longer answers either, the node is lost."""
        keep_alive(guard)
        guard.settimeout(SECONDS_TO_APPEAR)
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
            guard.recv(1)  # returns when the guard has ended
        except ConnectionError:
            pass
        except OSError:  # no answer to the probes
            silent_for = KEEPALIVE_IDLE + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL
        with self.lock:
            self.connected.pop(node, None)
        self._confirm(node, time.time() - silent_for)

    def _await_guards(self) -> None:
        time.sleep(SECONDS_TO_APPEAR)
        for node in self.unconnected():
            self._in_thread(self._confirm, node, time.time())

    def _confirm(self, node: str, last_seen: float) -> None:
        """Calls on_loss when the node no longer answers. A guard that was killed is no loss."""
        failed = 0
        self.suspects.add(node)
        while not self.is_over and failed < ATTEMPTS:
            if answers(self.addresses.get(node, node), self.port):
                failed = 0
                self.suspects.discard(node)
                time.sleep(SECONDS_BETWEEN_ATTEMPTS)
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
    except OSError:  # its connection has ended, which its own thread notices
        pass


def answers(node: str, port: int) -> bool:
    """Returns whether a node's kernel answers an attempt to connect; a refusal is an answer."""
    try:
        socket.create_connection((node, port), timeout=SECONDS_TO_ANSWER).close()
    except (ConnectionRefusedError, socket.gaierror):  # or there is no name server to ask
        return True
    except OSError:
        return False
    return True


def keep_alive(connection: socket.socket) -> None:
    """Has the kernel end the connection with an error once the other host has been silent for 11 s."""
    silence = KEEPALIVE_IDLE + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silence)
