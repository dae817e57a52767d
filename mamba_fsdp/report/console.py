"""What is seen of a training: lines that stay and, on a terminal, a live line below them, none wider than it is.

Whoever reads it may go (a closed window, `| head`); training continues.
"""

import contextlib
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any, TextIO

SECONDS_BETWEEN_UPDATES = 0.2
BEGINNING = r"^ *(?:\S+  +)*"  # of a line, up to its text: a name, as in `kernels    cpp: conv`, or an option
LESS_AND_LESS = (
    "MFU",
    "tok/s",
    "lr",
    "left",
    "loss",
)  # what a narrow terminal has no room for goes in this order


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
        if minutes >= 60
        else f"{minutes}:{seconds:02d}"
    )


def scaled(number: float, unit: str) -> str:
    """12345678, "B" -> 12.3 MB"""
    for power, prefix in enumerate("EPTGMk"):
        if number >= 1000 ** (6 - power):
            return f"{number / 1000 ** (6 - power):.1f} {prefix}{unit}"
    return f"{number:.0f} {unit}"


def read_share(share: float) -> str:
    """The part of the tokens that a loss is of."""
    return "all data" if share >= 1 else f"{100 * share:.3g}% of the data"


def say(name: str, value: object) -> None:
    """A line of what a verb tells: what it is about, and that."""
    print(f"{name:<14} {value}")


class Console:
    """Lines on rank 0 (`enabled`), nothing elsewhere."""

    def __init__(self, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.enabled, self.stream = enabled, stream or sys.stdout or open(os.devnull, "w")
        self.on_terminal = enabled and self.stream.isatty()
        self.live = self.on_terminal and os.environ.get("TERM") != "dumb"
        self.shown, self.next_update = "", 0.0

    def line(self, text: str) -> None:
        """Lines that stay, wrapped where a terminal needs it."""
        if self.enabled:
            rows = text.splitlines()
            if self.on_terminal:
                rows = [
                    textwrap.fill(
                        row,
                        self._width(),
                        subsequent_indent=" " * len(re.findall(BEGINNING, row)[0]),
                        break_long_words=False,
                        break_on_hyphens=False,
                    )
                    for row in rows
                ]
            self._clear()
            print("\n".join(rows), file=self.stream, flush=True)

    def passing(self, text: str) -> None:
        """What the live line says until something else comes."""
        if self.live and time.monotonic() >= self.next_update:
            self._clear()
            self.shown, self.next_update = (
                text[: self._width()],
                time.monotonic() + SECONDS_BETWEEN_UPDATES,
            )
            print("\r" + self.shown, end="", file=self.stream, flush=True)

    def step(
        self,
        step: int,
        total: int,
        *,
        loss: float,
        learning_rate: float,
        tokens_per_second: float,
        mfu: float | None = None,
        seconds_left: float | None = None,
        report: bool = False,
    ) -> None:
        """The state of training; stays where `report` is set."""
        parts = {
            "step": f"step {step:>{len(str(total))}}/{total}",
            "loss": f"loss {loss:7.4f}",
            "lr": f"lr {learning_rate:.2e}",
            "tok/s": f"{tokens_per_second:>7,.0f} tok/s",
        }
        parts |= {"MFU": f"MFU {mfu:5.1%}"} if mfu is not None else {}
        parts |= {"left": f"left {duration(seconds_left)}"} if seconds_left is not None else {}
        row = "  ".join(parts.values())
        if self.on_terminal:
            for least in LESS_AND_LESS:
                if len(row) > self._width():
                    parts.pop(least, None)
                    row = "  ".join(parts.values())
            row = row[: self._width()]
        (self.line if report else self.passing)(row)

    def close(self) -> None:
        if self.shown:
            print(file=self.stream, flush=True)
            self.shown = ""

    def _width(self):
        """One less than the terminal's: in the last column, some break the line."""
        try:
            columns = os.get_terminal_size(self.stream.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        return (columns or 80) - 1  # one that does not tell

    def _clear(self):
        if self.shown:
            print("\r" + " " * min(len(self.shown), self._width()), end="\r", file=self.stream)
            self.shown = ""


class Output:
    """A text stream that drops what can't be written. It is tried anew each time: a full disk may have room again."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.failed = stream, False

    def write(self, text: str) -> int:
        self._try(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, write, *text):
        try:
            write(*text)
        except (
            OSError,
            ValueError,
        ):  # ValueError: a character that the stream's encoding lacks, or it is closed
            self.failed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def output_that_may_go() -> Iterator[None]:
    """Inside, no print raises. A stream that failed stays silent afterwards, or Python would end with exit code 120."""
    before = sys.stdout, sys.stderr
    outputs = [Output(stream or open(os.devnull, "w")) for stream in before]
    sys.stdout, sys.stderr = outputs  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for output in outputs:
            output.flush()
            if output.failed:
                with contextlib.suppress(OSError, ValueError):  # no file, as in tests
                    os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
