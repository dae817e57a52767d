"""Signs of life: long work says now and then that it makes progress, so that nobody takes it for stuck."""

import threading
import time


class Heart:
    """work: how often this process made progress. last: the time.monotonic() when it, or a rank it waits for, did.
    beside: when a thread beside the main one did."""

    def __init__(self) -> None:
        self.work, self.last, self.beside = 0, time.monotonic(), 0.0

    def beat(self) -> None:
        self.work += 1
        if threading.current_thread() is not threading.main_thread():
            self.beside = time.monotonic()
        self.another_beats()

    def another_beats(self) -> None:
        """Note that a rank which this one waits for makes progress."""
        self.last = time.monotonic()


heart = Heart()  # of this process, all its threads together
