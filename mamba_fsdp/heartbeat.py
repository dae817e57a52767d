"""Signs of life: long work says now and then that it makes progress, so that nobody takes it for stuck."""

import time


class Heart:
    """work: how often this process made progress. last: when it, or a rank that it waits for, last did
    (time.monotonic())."""

    def __init__(self):
        self.work, self.last = 0, time.monotonic()

    def beat(self):
        self.work += 1
        self.last = time.monotonic()

    def another_beats(self):
        """A rank that this one waits for makes progress."""
        self.last = time.monotonic()


heart = Heart()  # of this process, all its threads together
