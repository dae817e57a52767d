"""Prints the output of a run: lines that stay and, on a terminal, a live line below them, cut to the terminal's width."""

import contextlib
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from mamba_fsdp.text import escape_unprintable

PrintLine = Callable[[str], None]  # prints a line, on rank 0
SECONDS_BETWEEN_UPDATES = 0.2


def describe_share(share: float) -> str:
    """Returns, in words, the share of the data that a validation read."""
    return "all data" if share >= 1 else f"{100 * share:.3g}% of the data"


def escape_for(stream: Any, text: str) -> str:
    """Returns `text` as it may be written to `stream`: for a terminal, with control characters shown as \\x1b."""
    return "\n".join(map(escape_unprintable, text.split("\n"))) if stream.isatty() else text


def print_field(name: str, value: object) -> None:
    """Prints a line of a verb's output: a name and its value."""
    print(f"{name:<14} {escape_unprintable(str(value))}")


def format_json(results: dict[str, Any]) -> str:
    """Returns the results as text: null for NaN, which JSON does not have, and other objects by their names."""
    text = json.dumps(results, default=str)
    without_nan = json.loads(text, parse_constant=lambda _: None)
    return json.dumps(without_nan, indent=1)


class Console:
    """A printer of lines, which prints only if `enabled`, as on rank 0."""

    def __init__(self, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.enabled = enabled
        self.stream = stream or sys.stdout or open(os.devnull, "w")
        self.has_live_line = enabled and self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.live_text = ""  # the live line
        self.next_update = 0.0

    def print_line(self, text: str) -> None:
        """Prints lines that stay."""
        if not self.enabled:
            return
        self.clear()
        print(escape_for(self.stream, text), file=self.stream, flush=True)

    def show_progress(self, text: str) -> None:
        """Shows a live line until the next output."""
        if self.has_live_line and time.monotonic() >= self.next_update:
            self.clear()
            self.live_text = escape_for(self.stream, text)[: self._width()]
            self.next_update = time.monotonic() + SECONDS_BETWEEN_UPDATES
            print("\r" + self.live_text, end="", file=self.stream, flush=True)

    def _width(self) -> int:
        """Returns one column less than the terminal has: some terminals break a line that reaches the last one."""
        return shutil.get_terminal_size().columns - 1

    def clear(self) -> None:
        """Removes the live line."""
        if self.live_text:
            spaces = " " * min(len(self.live_text), self._width())
            print(f"\r{spaces}", end="\r", file=self.stream)
            self.live_text = ""


discard_line: PrintLine = Console(enabled=False).print_line


class BestEffortFile(io.FileIO):
    """A file that drops data it can't write. Each write is tried again: a full disk may have room later."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def ignore_output_errors() -> None:
    """Makes later prints of this process never raise: training continues if their reader is gone or the disk is full."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(
            AttributeError, io.UnsupportedOperation
        ):  # a closed stream, or one of a notebook
            stream.flush()
            file = io.BufferedWriter(BestEffortFile(stream.fileno(), "w", closefd=False))
            text = io.TextIOWrapper(file, stream.encoding, "replace", line_buffering=True)
            setattr(sys, name, text)
