"""Runs the program in processes that are forked from a process with all its imports, to save the seconds that the
imports take. The processes have a part of the interface of Popen."""

import atexit
import gc
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.support.ports import hold_port, rank_environment
from tests.support.projects import PROJECT
from tests.support.ranks import PROCESSES

MAX_SECONDS = 800
# The ports stay reserved until this process ends, so that no other process gets one before rank 0 listens there.
PORTS: list[socket.socket] = []


class Training:
    """A process with the part of the interface of Popen that the tests use.

    merged: whether stderr is written to stdout.
    program: a file of the project, or "-m" and the name of a module.
    folder: the working directory.
    """

    def __init__(
        self, arguments, environment, merged=False, program=("training.py",), folder=PROJECT
    ):
        self._files = [tempfile.NamedTemporaryFile("r") for _ in range(1 if merged else 2)]
        names = (self._files[0].name, self._files[-1].name)
        self._process = PROCESSES.Process(
            target=_run, args=(program, arguments, environment, *names, folder)
        )
        self._process.start()
        self.pid = self._process.pid
        self.kill = self._process.kill

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("training.py", timeout)
        return self.returncode

    def communicate(self, timeout=None):
        self.wait(timeout)
        return (*(Path(file.name).read_text() for file in self._files), "")[:2]


def _run(program, arguments, environment, out, err, folder):
    os.chdir(folder)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    gc.freeze()  # see ranks.py
    *as_module, name = program
    sys.argv = [name, *arguments]
    try:
        if as_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(PROJECT / name), run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()


def start(command, folder, merged=True):
    """Starts a command line in a folder: `get_dataset.py ...`, `python -m MODULE ...` or `mamba-fsdp VERB ...`.

    The program can have the prefix .venv/bin/. Returns a Training.
    """
    program, *words = shlex.split(command)
    program = program.removeprefix(".venv/bin/")
    if program == "mamba-fsdp":
        words = ["-m", "mamba_fsdp", *words]
    elif program != "python":
        words = [program, *words]
    length = 2 if words[0] == "-m" else 1
    return Training(words[length:], dict(os.environ), merged, words[:length], folder)


def finish(process, command, code=0):
    """Waits for a Training, and returns its stdout. Raises AssertionError if the exit code is not `code`, or if the
    output contains a traceback."""
    output, errors = process.communicate(MAX_SECONDS)
    assert process.returncode == code, f"{command}\n{output}\n{errors}"
    assert "Traceback" not in output + errors, f"{command}\n{output}\n{errors}"
    return output


def run(command, folder, merged=True):
    """Runs a command line like `start`. Returns its stdout."""
    return finish(start(command, folder, merged), command)


def start_ranks(count, arguments, program=("training.py",), folder=PROJECT, per_node=None):
    """Starts a Training for each rank, with the environment that torchrun would give it.

    per_node: the number of ranks on a node; None puts all of them on one node.
    """
    held = hold_port()
    PORTS.append(held)
    port = held.getsockname()[1]
    ranks = []
    for rank in range(count):
        environment = os.environ | rank_environment(rank, count, port, per_node)
        ranks.append(Training(arguments, environment, True, program, folder))
    return ranks


def run_ranks(count, arguments, program=("training.py",), folder=PROJECT, per_node=None):
    """Runs a program on several ranks like `start_ranks`, and waits for all of them. Returns the output of rank 0.

    Raises AssertionError with the output of all ranks if one fails.
    """
    ranks = start_ranks(count, arguments, program, folder, per_node)
    try:
        outputs = [rank.communicate(MAX_SECONDS)[0] for rank in ranks]
    finally:  # Otherwise pytest would wait for a rank that hangs.
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(outputs)
    return outputs[0]
