"""A stand-in for storage that fails: one call to the operating system fails once, as a file server's does at a restart."""

import builtins
import contextlib
import errno
import io
import os
import threading
from pathlib import Path

OF_OS = "listdir lstat mkdir open rename replace rmdir scandir stat statvfs unlink utime".split()


class Disk:
    """The calls for what lies in `folder`, in order, without those of a thread that renews a lease."""

    def __init__(self, monkeypatch, folder):
        self.folder = str(folder)
        self.calls = []
        self.failing = None
        self.counts = False
        functions = [(os, name) for name in OF_OS] + [(io, "open"), (builtins, "open")]
        for module, name in functions:
            monkeypatch.setattr(module, name, self.watched(name, getattr(module, name)))

    @contextlib.contextmanager
    def counting(self, failing=None):
        """Notes the calls inside, and fails that of the number `failing`."""
        self.calls.clear()
        self.failing = failing
        self.counts = True
        try:
            yield
        finally:
            self.counts = False

    def watched(self, name, real):
        def function(path, *rest, **named):
            if self.counts and self.is_here(path):
                self.calls.append(f"{name} {path}")
                if len(self.calls) - 1 == self.failing:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(path, *rest, **named)

        return function

    def is_here(self, path):
        is_path = isinstance(path, (str, Path))
        return (
            is_path
            and str(path).startswith(self.folder)
            and threading.current_thread().name != "lease"
        )
