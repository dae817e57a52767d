"""Runs work in a thread, such as what reads a file back while another part of it is written."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(work: Callable[..., T], *inputs: Any) -> Future[T]:
    """Returns the Future of `work(*inputs)`, which runs in a thread that does not keep the process from ending.

    A ThreadPoolExecutor's threads do keep it, and multiprocessing's ThreadPool needs a /dev/shm with free space.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work(*inputs))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome
