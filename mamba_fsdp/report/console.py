"""What is seen of a training: lines that stay and, on a terminal, a live line below them, cut where it ends.

Whoever reads it may go (a closed window, `| head`); training continues.
"""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

Say = Callable[[str], None]  # prints a line, on rank 0
SECONDS_BETWEEN_UPDATES = 0.2
CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {ord("\t"), ord("\n")}
SHOWN_CONTROLS = {code: f"\\x{code:02x}" for code in CONTROLS}


def scaled(number: float, unit: str) -> str:
    """12345678, "B" -> 12.3 MB"""
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.1f} {prefix}{unit}"
    return f"{number:.0f} {unit}"


def read_share(share: float) -> str:
    """The part of the tokens that a loss is of."""
    return "all data" if share >= 1 else f"{100 * share:.3g}% of the data"


def fit_for(stream: Any, text: str) -> str:
    """`text` as it may be written to `stream`: on a terminal control characters, which could drive it, are shown."""
    return text.translate(SHOWN_CONTROLS) if stream.isatty() else text


def say(name: str, value: object) -> None:
    """Prints a line of what a verb tells: what it is about, and that."""
    print(fit_for(sys.stdout, f"{name:<14} {value}"))


class Console:
    """Lines on rank 0 (`enabled`), nothing elsewhere."""

    def __init__(self, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.enabled = enabled
        self.stream = stream or sys.stdout or open(os.devnull, "w")
        self.live = enabled and self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.shown = ""  # the live line
        self.next_update = 0.0

    def line(self, text: str) -> None:
        """Prints lines that stay."""
        if not self.enabled:
            return
        self.clear()
        print(fit_for(self.stream, text), file=self.stream, flush=True)

    def passing(self, text: str) -> None:
        """Shows a live line until something else comes."""
        if self.live and time.monotonic() >= self.next_update:
            self.clear()
            self.shown = fit_for(self.stream, text)[: self._width()]
            self.next_update = time.monotonic() + SECONDS_BETWEEN_UPDATES
            print("\r" + self.shown, end="", file=self.stream, flush=True)

    def _width(self) -> int:
        """One less than the terminal's: in the last column, some break the line."""
        return shutil.get_terminal_size().columns - 1

    def clear(self) -> None:
        """Takes the live line away."""
        if self.shown:
            spaces = " " * min(len(self.shown), self._width())
            print(f"\r{spaces}", end="\r", file=self.stream)
            self.shown = ""


class Output:
    """A text stream that drops what can't be written. It is tried anew each time: a full disk may have room again."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.failed = False

    def write(self, text: str) -> int:
        self._attempt(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._attempt(self.stream.flush)

    def _attempt(self, action, *arguments):
        try:
            action(*arguments)
        except (OSError, ValueError):  # ValueError: closed, or a character that its encoding lacks
            self.failed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def output_that_may_go() -> Iterator[None]:
    """Inside, no print raises. A stream that failed stays silent afterwards, or Python would end with exit code 120."""
    before = (sys.stdout, sys.stderr)
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
