"""Tests mamba_fsdp.launch.supervisor: how a job runs its commands, and how signals affect them."""

import os
import signal
import sys
import threading
import time

import pytest

from mamba_fsdp.launch.supervisor import (
    DeadlineExceeded,
    StopRequested,
    Supervisor,
    stop_file_writer,
)
from tests.support.processes import wait_until

SLEEPS = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"]
PARENT = "import os, signal, sys; os.kill(os.getppid(), signal.{}); exec(sys.argv[1])"


def tells_parent(number, then):
    """Returns a command that sends a signal to this process and then runs the Python code `then`."""
    return [sys.executable, "-c", PARENT.format(number.name), then]


@pytest.fixture
def supervisor():
    """Provides a Supervisor that handles SIGUSR1. The signal handlers of the process are restored after the test."""
    numbers = (signal.SIGUSR1, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    supervisor = Supervisor()
    supervisor.listen(
        {signal.SIGUSR1: supervisor.request_stop, signal.SIGALRM: supervisor.on_deadline}
    )
    yield supervisor
    for number, handler in before.items():
        signal.signal(number, handler)
    if supervisor.child:
        supervisor.send(signal.SIGKILL)
        supervisor.child.wait()


@pytest.mark.parametrize("command, code", [("exit 3", 3), ("kill -KILL $$", 137)])
def test_an_exit_code_is_the_shells(supervisor, command, code):
    assert supervisor.run(["sh", "-c", command]) == code


def test_a_request_to_stop_ends_other_commands_than_the_training_at_once(supervisor):
    """A signal that requests a stop ends a command other than a training at once, and later commands are not
    started."""
    with pytest.raises(StopRequested):
        supervisor.run(tells_parent(signal.SIGUSR1, "import time; time.sleep(600)"))
    assert supervisor.stop_signal == "USR1" and supervisor.last_code == 143
    with pytest.raises(StopRequested):
        supervisor.run_for_output(["true"])


@pytest.mark.parametrize("method", ["run", "run_for_output"])
def test_a_signal_that_does_not_interrupt_the_wait_is_handled(supervisor, method):
    """A signal that does not interrupt the wait for a command also stops the command. Here, another thread receives the
    signal. A signal just before the system call has the same effect."""

    def take_signal():
        wait_until(lambda: supervisor.child)
        time.sleep(0.3)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    thread = threading.Thread(target=take_signal)
    thread.start()
    with pytest.raises(StopRequested):
        getattr(supervisor, method)(SLEEPS)
    thread.join()


def test_a_request_while_nothing_runs_is_not_lost(supervisor):
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(StopRequested):
        supervisor.run(["true"])
    asked = []
    assert supervisor.run_training(["true"], lambda: asked.append(1)) == 0
    assert asked == [1]


def test_a_training_is_asked_to_stop_and_awaited(supervisor, tmp_path):
    """A signal requests a training to stop once, through a file, however often it arrives. The training then exits by
    itself."""
    file = tmp_path / "STOP"
    wait = f"import os, time\nwhile not os.path.exists({str(file)!r}): time.sleep(0.02)"
    wait += "\nos.kill(os.getppid(), signal.SIGUSR1); time.sleep(0.2); sys.exit(5)"
    with stop_file_writer(str(file), lambda: "SIGUSR1\n") as ask:
        assert supervisor.run_training(tells_parent(signal.SIGUSR1, wait), ask) == 5
        assert file.read_text() == "SIGUSR1\n"
    assert not list(tmp_path.iterdir()), "the next start would take it for its own"


def test_a_request_is_written_as_soon_as_the_storage_works(tmp_path, monkeypatch):
    monkeypatch.setattr("mamba_fsdp.launch.supervisor.RETRY_SECONDS", 0.05)
    file = tmp_path / "not yet" / "STOP"
    with stop_file_writer(str(file), lambda: "SIGTERM\n") as ask:
        ask()
        time.sleep(0.2)
        file.parent.mkdir()
        wait_until(file.exists)


@pytest.mark.parametrize("method, ask", [("run_training", [print]), ("run_for_output", [])])
def test_a_command_that_exceeds_its_deadline_is_not_awaited(supervisor, method, ask):
    """At the deadline, the job no longer waits for its command, even if the command only prints, because waiting could
    cost the job its place in the queue."""
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(DeadlineExceeded):
        getattr(supervisor, method)(SLEEPS, *ask)


def test_signals_of_the_terminal_do_not_reach_a_command(supervisor):
    session = supervisor.run_for_output([sys.executable, "-c", "import os; print(os.getsid(0))"])
    assert int(session) == supervisor.last_pid != os.getsid(0)
