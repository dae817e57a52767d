"""Ranks as forks of a process of the node that has imported what training imports: they begin with the settings, and
those that start again in place of lost ones within a second. That process does nothing else: a fork keeps no threads.
"""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess

from mamba_fsdp.errors import first_line

IMPORTS = [
    "fire",
    "mamba_fsdp.command_line",
    "mamba_fsdp.launch.forks",
    "mamba_fsdp.train.run",
    "mamba_fsdp.interop.convert",
    "mamba_fsdp.verbs.loading",
    "torch._dynamo",
    "mamba_fsdp.parallel.fsdp1",
    "mamba_fsdp.parallel.fsdp2",
]  # what torch lacks is passed over
REQUESTS_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def prepare() -> None:
    """Starts that process; it imports while torchrun looks for the other nodes."""
    signal.pthread_sigmask(
        signal.SIG_BLOCK, REQUESTS_TO_STOP
    )  # Slurm asks all processes; what we start inherits it
    sys.modules["__main__"].__spec__ = ModuleSpec(
        "__main__", None
    )  # else ranks run the launcher's module once more
    multiprocessing.set_forkserver_preload(IMPORTS)
    resource_tracker.ensure_running()  # which lets SIGINT and SIGTERM through when it has started
    signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS_TO_STOP)
    forkserver.ensure_running()
    atexit.register(_end_server)
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, REQUESTS_TO_STOP
    )  # those that came meanwhile come now


def _end_server():
    """At once: while it imports, torch makes folders for its caches, also where they were removed."""
    with contextlib.suppress(OSError, TypeError):  # it is gone
        os.kill(server := forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        os.waitpid(server, 0)


class Rank(ForkServerProcess):
    """One rank. words: python -u FILE and its arguments."""

    def __init__(self, words: tuple[str, ...], environment: dict[str, str]) -> None:
        super().__init__(target=_run, args=(words[2:], environment))
        self.start()
        self.poll, self.wait = lambda: self.exitcode, self.join

    def send_signal(self, number: int) -> None:
        """SIGKILL to what the rank has started too."""
        for kill in (os.kill, os.killpg)[: 1 + (number == signal.SIGKILL)]:
            with contextlib.suppress(
                ProcessLookupError
            ):  # it has ended, or has not come to os.setsid
                kill(self.pid or 0, number)


def _run(words, environment):
    os.setsid()
    for number in REQUESTS_TO_STOP:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS_TO_STOP)
    os.environ.clear()  # of what was told to the first start alone
    os.environ.update(environment)
    # A library has asked CUDA something: its forks can't use it.
    if (cuda := sys.modules.get("torch.cuda")) and cuda._is_in_bad_fork():
        os.execv(sys.executable, [sys.executable, "-u", *words])
    sys.argv = list(words)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except Exception as error:  # which the launcher knows: most fail only because of another
        if environment["WORLD_SIZE"] == "1":
            sys.excepthook(*sys.exc_info())
        else:
            print(f"rank {environment['RANK']} failed: {first_line(error)[:160]}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()
