"""Signs of life: long work says now and then that it makes progress, so that nobody takes it for stuck."""

import time


class Heart:
    """work: how often this process made progress. last: the time.monotonic() when it, or a rank it waits for, did."""

    def __init__(self) -> None:
        self.work = 0
        self.last = time.monotonic()

    def beat(self) -> None:
        self.work += 1
        self.another_beats()

    def another_beats(self) -> None:
        """Note that a rank which this one waits for makes progress."""
        self.last = time.monotonic()


heart = Heart()  # of this process, all its threads together
