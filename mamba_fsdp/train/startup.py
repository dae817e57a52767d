"""How long each part of a start takes, from the queue to the first step."""

import os
import time


class Startup:
    """`parts`: seconds by name, in order. What came before this process says START_PARTS in the environment, words
    NAME=SECONDS joined by +, the last one since=EPOCH; each program that starts another hands it on (`told`)."""

    def __init__(self) -> None:
        words = [word.split("=") for word in os.environ.get("START_PARTS", "").split("+") if word]
        self.parts = {name: float(seconds) for name, seconds in words}
        self.since, self.steps = self.parts.pop("since", time.time() - time.process_time()), 0

    def told(self) -> str:
        return "+".join(f"{name}={seconds:.3f}" for name, seconds in (self.parts | {"since": self.since}).items())

    def done(self, part: str) -> None:
        """What has passed since the last part was `part`."""
        now = time.time()
        self.parts[part], self.since = round(self.parts.get(part, 0.0) + now - self.since, 3), now

    def stepped(self) -> bool:
        """Call after each step. Whether the start is known now: the second step shows what the first one compiled."""
        self.steps += 1
        if self.steps == 1:
            self.done("first step")
        elif self.steps == 2:
            first, second = self.parts.pop("first step"), time.time() - self.since
            self.parts |= {"compile": round(max(0.0, first - second), 3), "first step": round(min(first, second), 3)}
        return self.steps == 2

    def line(self) -> str:
        """For the log; parts shorter than a tenth of a second are left out."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items() if seconds >= 0.1)
        return f"start      first step after {sum(self.parts.values()):.1f} s: {parts}"
