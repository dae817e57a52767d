"""Keeps signs of life: long work reports its progress now and then, so that the watchdog does not take it for stuck."""

import time
from collections.abc import Callable


class Heart:
    """Counts the progress of this process.

    work: how often it made progress. last: the time.monotonic() at which it, or a rank that it waits for, last did. if_stuck: is
    called before the watchdog ends the process.
    """

    def __init__(self) -> None:
        self.work = 0
        self.last = time.monotonic()
        self.if_stuck: Callable[[], None] | None = None

    def beat(self) -> None:
        """Notes that this process makes progress."""
        self.work += 1
        self.another_beats()

    def another_beats(self) -> None:
        """Notes that a rank which this one waits for makes progress."""
        self.last = time.monotonic()


heart = Heart()  # of this process, all its threads together
