"""How long each part of a start takes, from the queue to the first step."""

import os
import time


class Startup:
    """`parts`: seconds by name, in order. The launcher tells those before in START_PARTS: words
    NAME=SECONDS joined by +, the last one since=EPOCH. RANKS_BEGAN is when it started this
    process."""

    def __init__(self) -> None:
        now = time.time()
        self.since = float(os.environ.get("RANKS_BEGAN", now - time.process_time()))
        self.began = self.since
        self.steps = 0
        self.parts: dict[str, float] = {}
        for word in os.environ.get("START_PARTS", "").split("+"):
            name, _, seconds = word.partition("=")
            if name == "since":
                self.parts["launch"] = round(self.since - float(seconds), 3)
            elif name:
                self.parts[name] = float(seconds)

    def done(self, part: str) -> None:
        """What has passed since the last part was `part`; behind the first step it is none of the
        start."""
        now = time.time()
        if not self.steps:
            self.parts[part] = round(now - self.since, 3)
        self.since = now

    def stepped(self) -> bool:
        """Call after each step. Whether the start is known now: the second step shows what the
        first one compiled."""
        if self.steps == 0:
            self.done("first step")
        self.steps += 1
        if self.steps != 2:
            return False
        first = self.parts.pop("first step")
        second = time.time() - self.since
        self.parts["compile"] = round(max(0.0, first - second), 3)
        self.parts["first step"] = round(min(first, second), 3)
        return True

    def line(self) -> str:
        """For the log; parts shorter than a tenth of a second are left out."""
        parts = [f"{name} {seconds:.1f}" for name, seconds in self.parts.items() if seconds >= 0.1]
        return f"start      first step after {sum(self.parts.values()):.1f} s: {', '.join(parts)}"
