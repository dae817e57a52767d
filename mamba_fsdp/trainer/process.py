"""Prepares a process for training, and restores the state of the process at the end, because a notebook or another
program continues in this process after the training."""

import contextlib
import os
import resource
from collections.abc import Iterator

from mamba_fsdp.ops import cpp
from mamba_fsdp.parallel.compat import deterministic_algorithms


@contextlib.contextmanager
def training_process(deterministic: bool) -> Iterator[None]:
    """Lets the block train in this process, and restores the state of the process at its end.

    At the end, this function restores torch's modes, the treatment of denormal numbers (changed by cpp.tune_process),
    the limit of open files (start_world), and the environment variables, because libraries change them too.
    StopRequest restores the signal handlers. The settings of glibc's allocator are not restored, because glibc can't
    be asked for their former values.

    deterministic: whether to use deterministic operations. Enter the block before the first operation of torch.
    """
    environment = dict(os.environ)
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    flushes = cpp.flushes_denormals()
    try:
        with deterministic_algorithms(deterministic):
            yield
    finally:
        cpp.flush_denormals(flushes)
        resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
