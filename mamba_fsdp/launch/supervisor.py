"""Runs the commands of a job one after the other, and passes on what signals ask for meanwhile. For the cluster's
own Python, see host.py."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from types import FrameType
from typing import Callable, Dict, Iterator, List, Optional, Sequence, TypeVar

T = TypeVar("T")

SECONDS_BETWEEN_TRIES = 2.0
MAX_SECONDS_DEAF = 1.0  # to a signal that has not interrupted a system call
SECONDS_FOR_STORAGE = 10.0  # that a request which can't be written may hold up the end


class StopAsked(Exception):
    """A signal has asked the job to stop before its training began, or between two of its commands."""


class TooLate(Exception):
    """The job can't wait for its command any longer."""


class NodeLost(Exception):
    """A node is lost on which the job's command was running."""


class Supervisor:
    """The one who runs commands, each in a session of its own, which no signal reaches but through here.

    asked: the name of the first signal that asked to stop; "" until there is one. child: the command that runs now.
    last_pid, last_code: of the command that ran last.
    """

    def __init__(self) -> None:
        self.asked = ""
        self.child: "Optional[subprocess.Popen[str]]" = None
        self.ask_child: Callable[[], None] = self.terminate
        self.last_pid = 0
        self.last_code = 0
        self.waits = False
        self.is_too_late = False
        self.has_lost_node = False

    def listen(self, handlers: Dict[int, Callable[[int], None]]) -> None:
        """Calls the handlers at their signals from now on."""

        def as_handler(handle: Callable[[int], None]) -> Callable[[int, Optional[FrameType]], None]:
            return lambda number, frame: handle(number)

        for number, handle in handlers.items():
            signal.signal(number, as_handler(handle))

    def ask_to_stop(self, number: int) -> None:
        """Asks what runs now to stop, the first time that a signal wants it."""
        if not self.asked:
            self.asked = signal.Signals(number).name[len("SIG") :]
            if self.child:
                self.ask_child()

    def reason(self) -> str:
        """Returns why the ranks are asked to stop: status.json keeps it."""
        return f"SIG{self.asked}\n"

    def check_asked(self) -> None:
        """Raises StopAsked if a signal has asked to stop."""
        if self.asked:
            raise StopAsked

    def run(self, command: Sequence[str]) -> int:
        """Returns the exit code of a command, which SIGTERM ends if a signal asks to stop. Raises StopAsked then,
        and if a signal has asked before; NodeLost after lose_node, and TooLate after give_up_waiting."""
        self.check_asked()
        self._start(command, self.terminate)
        code = self._end_of_child()
        self.check_asked()
        return code

    def output_of(self, command: Sequence[str], with_errors: bool = False) -> str:
        """Returns what a command prints to stdout; with_errors: to stderr too. Raises as `run` does."""
        self.check_asked()
        stderr = subprocess.STDOUT if with_errors else None
        child = self._start(command, self.terminate, stdout=subprocess.PIPE, stderr=stderr)
        with self._waiting():
            output, _ = heeding_signals(child.communicate)
        self._end_of_child()
        self.check_asked()
        return output

    def run_training(self, command: Sequence[str], ask: Callable[[], None]) -> int:
        """Returns the exit code of a command that ends in good order once `ask` has asked it to. Raises TooLate
        if `give_up_waiting` was called, NodeLost if lose_node was."""
        self._start(command, ask)
        return self._end_of_child()

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
        if self.asked:  # since it was looked at last
            ask()
        if self.has_lost_node:
            self.send(signal.SIGKILL)
        return child

    def _end_of_child(self) -> int:
        assert self.child
        with self._waiting():
            code = heeding_signals(self.child.wait)
        self.child = None
        self.last_code = code if code >= 0 else 128 - code
        if self.has_lost_node:
            self.has_lost_node = False
            raise NodeLost
        return self.last_code

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Has `give_up_waiting` end the block with TooLate."""
        try:
            self.waits = True
            if self.is_too_late:
                raise TooLate
            yield
        finally:
            self.waits = False

    def terminate(self) -> None:
        """Ends the command that runs now, and what it has started."""
        self.send(signal.SIGTERM)

    def send(self, number: int) -> None:
        """Sends a signal to the command that runs now, and to what it has started but ranks: they are in sessions
        of their own."""
        if self.child:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, number)

    def lose_node(self) -> None:
        """Kills the command that runs now, or the next one, which then raises NodeLost. Any thread may call it."""
        self.has_lost_node = True
        self.send(signal.SIGKILL)

    def give_up_waiting(self, number: int) -> None:
        """Handles a signal that says that the job can't wait any longer."""
        self.is_too_late = True
        if self.waits:
            raise TooLate


def heeding_signals(wait: Callable[..., T]) -> T:
    """Returns the result of `wait(timeout=...)`, which it calls until that does not raise TimeoutExpired.

    Python calls a signal's handler between two bytecodes. A signal that reaches another thread, or this one just before
    it enters a system call, does not interrupt the call: its handler would wait until the child has ended.
    """
    while True:
        try:
            return wait(timeout=MAX_SECONDS_DEAF)
        except subprocess.TimeoutExpired:
            pass


def processes_below(pid: int) -> List[int]:
    """Returns the processes that a process has started and that have not ended."""
    children = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                children += [int(word) for word in file.read().split()]
    return children


@contextlib.contextmanager
def written_until(file: str, text: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """Yields a function that writes a file from a thread, again and again until it succeeds: storage may fail for a
    moment. The file is removed at the end of the block."""
    over = threading.Event()
    threads: List[threading.Thread] = []

    def write() -> None:
        while not over.is_set():
            try:
                unfinished = file + ".unfinished"  # no rank reads it before it says why
                with open(unfinished, "w") as stop:
                    stop.write(text())
                os.replace(unfinished, file)
                return
            except OSError:
                over.wait(SECONDS_BETWEEN_TRIES)

    def start() -> None:
        threads.append(threading.Thread(target=write, daemon=True))
        threads[-1].start()

    try:
        yield start
    finally:
        over.set()
        end = time.monotonic() + SECONDS_FOR_STORAGE
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        with contextlib.suppress(OSError):
            os.unlink(file)
