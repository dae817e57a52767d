"""Prepares a process for training, and restores it at the end: a notebook or a caller's program continues after it."""

import contextlib
import os
import resource
from collections.abc import Iterator

from mamba_fsdp.ops import cpp, loss
from mamba_fsdp.parallel.compat import deterministic_algorithms


@contextlib.contextmanager
def training_process(deterministic: bool) -> Iterator[None]:
    """Lets the block train in this process, with deterministic operations if asked. At its end it restores
    torch's modes, the treatment of denormal numbers (cpp.tune_process), the limit of open files (start_world), the loss
    as it is uncompiled (compile_blocks), and the environment, which libraries change too.

    Enter it before the first operation. StopRequest restores the signal handlers by itself. glibc's way of reusing freed
    memory stays changed, since glibc does not tell how it was.
    """
    environment = dict(os.environ)
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    flushes = cpp.flushes_denormals()
    on_device = loss.on_device
    try:
        with deterministic_algorithms(deterministic):
            yield
    finally:
        cpp.flush_denormals(flushes)
        loss.on_device = on_device
        resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
