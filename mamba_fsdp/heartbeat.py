"""Signs of life: long work says now and then that it makes progress, so that nobody takes it for stuck."""

import time
from collections.abc import Callable


class Heart:
    """work: how often this process made progress. last: the time.monotonic() when it, or a rank it waits for, did.
    if_stuck: what is to be done before the process is ended for want of progress."""

    def __init__(self) -> None:
        self.work = 0
        self.last = time.monotonic()
        self.if_stuck: Callable[[], None] | None = None

    def beat(self) -> None:
        self.work += 1
        self.another_beats()

    def another_beats(self) -> None:
        """Note that a rank which this one waits for makes progress."""
        self.last = time.monotonic()


heart = Heart()  # of this process, all its threads together
