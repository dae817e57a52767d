"""Runs a function in a thread, for example to read back one part of a file while another part is written."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(work: Callable[..., T], *inputs: Any) -> Future[T]:
    """Runs `work(*inputs)` in a daemon thread and returns its Future. The process can exit while the thread runs.

    The threads of a ThreadPoolExecutor would delay the exit, and multiprocessing's ThreadPool needs free space in /dev/shm.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work(*inputs))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome
