"""Simulates storage that fails, once or permanently, as during the restart of a file server."""

import builtins
import contextlib
import errno
import io
import os
import threading
from pathlib import Path

OF_OS = "listdir lstat mkdir open rename replace rmdir scandir stat statvfs unlink utime".split()


class Disk:
    """Intercepts the calls to the operating system for files in `folder`, except the calls of a thread that renews a
    lease."""

    def __init__(self, monkeypatch, folder):
        self.folder = str(folder)
        self.calls = []
        self.failing = None
        self.counts = False
        self.lost = None
        functions = [(os, name) for name in OF_OS] + [(io, "open"), (builtins, "open")]
        for module, name in functions:
            monkeypatch.setattr(module, name, self.watched(name, getattr(module, name)))

    @contextlib.contextmanager
    def counting(self, failing=None):
        """Records the calls in the block, in order. The call with the number `failing` fails."""
        self.calls.clear()
        self.failing = failing
        self.counts = True
        try:
            yield
        finally:
            self.counts = False

    def lose(self, end):
        """Makes all later calls for paths with this ending fail."""
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
