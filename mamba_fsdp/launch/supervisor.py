"""Runs the commands of a job one after the other, and reacts to signals while they run.

This module runs on the cluster's own Python; host.py describes the restrictions.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from types import FrameType
from typing import Callable, Dict, Iterator, List, Optional, Sequence, TypeVar

T = TypeVar("T")

RETRY_SECONDS = 2.0
SIGNAL_POLL_SECONDS = 1.0  # longest delay of a signal that does not interrupt a system call
STORAGE_TIMEOUT_SECONDS = 10.0  # time limit for a write that hangs when the job ends


class StopRequested(Exception):
    """Raised if a signal has requested a stop, except while `run_training` runs a command."""


class DeadlineExceeded(Exception):
    """Raised if the job can't wait for the current command any longer."""


class NodeLost(Exception):
    """Raised if a node of the current command is lost."""


class Supervisor:
    """Runs commands, each in its own session, so that signals of the terminal or of Slurm reach
    only this process.

    stop_signal: the name of the first signal that requested a stop; "" if there was none. child:
    the command that is running. last_pid, last_code: process id and exit code of the most recent
    command.
    """

    def __init__(self) -> None:
        self.stop_signal = ""
        self.child: "Optional[subprocess.Popen[str]]" = None
        self.ask_child: Callable[[], None] = self.terminate
        self.last_pid = 0
        self.last_code = 0
        self.is_waiting = False
        self.deadline_passed = False
        self.has_lost_node = False

    def listen(self, handlers: Dict[int, Callable[[int], None]]) -> None:
        """Installs signal handlers. handlers: {signal: function that is called with the signal's
        number}.
        """

        def as_handler(handle: Callable[[int], None]) -> Callable[[int, Optional[FrameType]], None]:
            return lambda number, frame: handle(number)

        for number, handle in handlers.items():
            signal.signal(number, as_handler(handle))

    def request_stop(self, number: int) -> None:
        """Handles a signal that requests a stop: asks the current command to stop. Later signals
        have no effect.
        """
        if not self.stop_signal:
            self.stop_signal = signal.Signals(number).name[len("SIG") :]
            if self.child:
                self.ask_child()

    def reason(self) -> str:
        """Returns the reason for the stop. The ranks write it to status.json."""
        return f"SIG{self.stop_signal}\n"

    def raise_if_stop_requested(self) -> None:
        """Raises StopRequested if a signal has requested a stop."""
        if self.stop_signal:
            raise StopRequested

    def run(self, command: Sequence[str]) -> int:
        """Runs a command and returns its exit code. SIGTERM ends the command if a signal requests a
        stop.

        Raises StopRequested if a signal requests a stop, or has requested it before; NodeLost after
        abort_for_lost_node; DeadlineExceeded after on_deadline.
        """
        self.raise_if_stop_requested()
        self._start(command, self.terminate)
        code = self._wait_for_child()
        self.raise_if_stop_requested()
        return code

    def run_for_output(self, command: Sequence[str], with_errors: bool = False) -> str:
        """Runs a command and returns its stdout, with stderr if with_errors is true.

        Raises StopRequested, NodeLost and DeadlineExceeded like `run`.
        """
        self.raise_if_stop_requested()
        stderr = subprocess.STDOUT if with_errors else None
        child = self._start(command, self.terminate, stdout=subprocess.PIPE, stderr=stderr)
        with self._waiting():
            output, _ = wait_interruptibly(child.communicate)
        self._wait_for_child()
        self.raise_if_stop_requested()
        return output

    def run_training(self, command: Sequence[str], ask: Callable[[], None]) -> int:
        """Runs a command that shuts down cleanly when `ask` is called, and returns its exit code.

        `ask` is called when a signal requests a stop. Raises DeadlineExceeded after on_deadline,
        and NodeLost after abort_for_lost_node.
        """
        self._start(command, ask)
        return self._wait_for_child()

    def _start(
        self,
        command: Sequence[str],
        ask: Callable[[], None],
        stdout: Optional[int] = None,
        stderr: Optional[int] = None,
    ) -> "subprocess.Popen[str]":
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            universal_newlines=True,
            start_new_session=True,
        )
        self.ask_child = ask
        self.last_pid = child.pid
        self.child = child
        if self.stop_signal:  # the signal arrived after the last check
            ask()
        if self.has_lost_node:
            self.send(signal.SIGKILL)
        return child

    def _wait_for_child(self) -> int:
        assert self.child
        with self._waiting():
            code = wait_interruptibly(self.child.wait)
        self.child = None
        self.last_code = code if code >= 0 else 128 - code
        if self.has_lost_node:
            self.has_lost_node = False
            raise NodeLost
        return self.last_code

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Lets on_deadline end the `with` block with DeadlineExceeded."""
        try:
            self.is_waiting = True
            if self.deadline_passed:
                raise DeadlineExceeded
            yield
        finally:
            self.is_waiting = False

    def terminate(self) -> None:
        """Sends SIGTERM to the current command and its children."""
        self.send(signal.SIGTERM)

    def send(self, number: int) -> None:
        """Sends a signal to the current command and its children. Ranks are not reached, because
        they have their own sessions.
        """
        if self.child:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, number)

    def abort_for_lost_node(self) -> None:
        """Kills the current command, or the next one, and makes the method that runs the command
        raise NodeLost. Any thread can call this method.
        """
        self.has_lost_node = True
        self.send(signal.SIGKILL)

    def on_deadline(self, number: int) -> None:
        """Handles the signal of the deadline: the job does not wait for the current command any
        longer.
        """
        self.deadline_passed = True
        if self.is_waiting:
            raise DeadlineExceeded


def wait_interruptibly(wait: Callable[..., T]) -> T:
    """Calls `wait(timeout=...)` repeatedly until it does not raise TimeoutExpired, and returns its
    result.

    Python runs signal handlers only between two bytecodes. A signal that another thread receives,
    or that arrives just before a system call, does not interrupt that call, so the handler would
    not run until the child has ended.
    """
    while True:
        try:
            return wait(timeout=SIGNAL_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            pass


def list_children(pid: int) -> List[int]:
    """Returns the child processes of a process."""
    children = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                children += [int(word) for word in file.read().split()]
    return children


@contextlib.contextmanager
def stop_file_writer(file: str, text: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """Yields a function that writes a file in a thread. The file is removed at the end of the
    `with` block.

    Writing is retried until it succeeds, because the storage can fail temporarily. text: a function
    that returns the content of the file.
    """
    over = threading.Event()
    threads: List[threading.Thread] = []

    def write() -> None:
        while not over.is_set():
            try:
                # The file is renamed when it is complete, so that ranks never read a part of it.
                unfinished = file + ".unfinished"
                with open(unfinished, "w") as stop:
                    stop.write(text())
                os.replace(unfinished, file)
                return
            except OSError:
                over.wait(RETRY_SECONDS)

    def start() -> None:
        threads.append(threading.Thread(target=write, daemon=True))
        threads[-1].start()

    try:
        yield start
    finally:
        over.set()
        end = time.monotonic() + STORAGE_TIMEOUT_SECONDS
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        with contextlib.suppress(OSError):
            os.unlink(file)
