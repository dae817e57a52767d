"""Simulates storage on which one call fails, as during the restart of a file server, or on which all later calls for
some paths fail."""

import builtins
import contextlib
import errno
import io
import os
import threading
from pathlib import Path

from mamba_fsdp.storage import retry

OS_FUNCTIONS = (
    "listdir lstat mkdir open rename replace rmdir scandir stat statvfs unlink utime".split()
)


class Disk:
    """Intercepts the calls to the operating system for files in `folder`, except the calls of a thread that renews a
    lease."""

    def __init__(self, monkeypatch, folder):
        self.monkeypatch = monkeypatch
        self.folder = str(folder)
        self.calls = []
        self.failing = None
        self.counts = False
        self.lost = None
        monkeypatch.setattr(retry, "MAX_PAUSE", 0.0)
        functions = [(os, name) for name in OS_FUNCTIONS] + [(io, "open"), (builtins, "open")]
        for module, name in functions:
            monkeypatch.setattr(module, name, self.watched(name, getattr(module, name)))

    @contextlib.contextmanager
    def counting(self, failing=None):
        """Records the calls in the block, in order. The call with the number `failing`, counted from 0, fails."""
        self.calls.clear()
        self.failing = failing
        self.counts = True
        try:
            yield
        finally:
            self.counts = False

    def check_single_failures(self, prepare, scenario, read, step=1):
        """Runs a scenario once for each of its calls, and lets only this call fail. Asserts that the results are always
        the same as without a failure.

        prepare: a function that is called before each run. Its result is the argument of the scenario.
        read: a function that is called after each run. Its result is compared, too.
        step: only the failures of every step-th call are tested.
        """

        def run(failing=None):
            prepared = prepare()
            with self.counting(failing):
                result = scenario(prepared)
            return result, read()

        expected = run()
        calls = list(self.calls)
        assert calls
        for number in range(0, len(calls), step):
            try:
                found = run(number)
            except Exception as error:
                raise AssertionError(f"{self.calls[number]} fails once") from error
            assert found == expected, f"{self.calls[number]} fails once"

    def lose(self, end):
        """Makes all later calls for paths with this ending fail."""
        self.monkeypatch.setattr(retry, "RETRY_SECONDS", 0.0)
        self.lost = end

    def watched(self, name, real):
        def function(path, *rest, **named):
            if self.is_here(path) and self.fails(name, str(path)):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(path, *rest, **named)

        return function

    def fails(self, name, path):
        if self.counts:
            self.calls.append(f"{name} {path}")
            return len(self.calls) - 1 == self.failing
        return self.lost is not None and path.endswith(self.lost)

    def is_here(self, path):
        is_path = isinstance(path, (str, Path))
        is_lease = threading.current_thread().name == "lease"
        return is_path and str(path).startswith(self.folder) and not is_lease
