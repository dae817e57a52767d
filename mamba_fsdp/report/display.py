"""What the terminal shows while training: one live line on a terminal, a plain line per report elsewhere."""

import sys
import time
from typing import TextIO

SECONDS_BETWEEN_UPDATES = 0.2


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"


class Display:
    """Lines on rank 0 (`enabled`), nothing elsewhere."""

    def __init__(self, total_steps: int, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.total, self.enabled, self.stream = total_steps, enabled, stream or sys.stdout
        self.live = enabled and self.stream.isatty()
        self.shown, self.next_update = "", 0.0

    def line(self, text: str) -> None:
        """A line that stays."""
        if self.enabled:
            self._clear()
            print(text, file=self.stream, flush=True)

    def step(self, step: int, *, loss: float, learning_rate: float, tokens_per_second: float, mfu: float | None = None,
             seconds_left: float | None = None, report: bool = False) -> None:
        """The state of training; stays as a line where there is no terminal and `report` is set."""
        if not self.enabled or not (report or (self.live and time.monotonic() >= self.next_update)):
            return
        parts = [f"step {step:>{len(str(self.total))}}/{self.total}", f"loss {loss:7.4f}", f"lr {learning_rate:.2e}",
                 f"{tokens_per_second:>9,.0f} tokens/s"]
        parts += [f"MFU {mfu:5.1%}"] if mfu is not None else []
        parts += [f"left {duration(seconds_left)}"] if seconds_left is not None else []
        text = "  ".join(parts)
        if self.live:
            self._clear()
            print("\r" + text, end="", file=self.stream, flush=True)
            self.shown, self.next_update = text, time.monotonic() + SECONDS_BETWEEN_UPDATES
        else:
            print(text, file=self.stream, flush=True)

    def _clear(self):
        if self.shown:
            print("\r" + " " * len(self.shown), end="\r", file=self.stream)
            self.shown = ""

    def close(self) -> None:
        if self.shown:
            print(file=self.stream, flush=True)
            self.shown = ""
