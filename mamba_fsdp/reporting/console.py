"""Prints the output of a run: permanent lines and, on a terminal, a live line below them."""

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

PrintLine = Callable[[str], None]  # a function that prints a line on rank 0
SECONDS_BETWEEN_UPDATES = 0.2


def describe_share(share: float) -> str:
    """Describes the share of the data that a validation has read."""
    return "all data" if share >= 1 else f"{100 * share:.3g}% of the data"


def escape_for(stream: Any, text: str) -> str:
    """Escapes control characters in `text`, except line breaks, if `stream` is a terminal."""
    return "\n".join(map(escape_unprintable, text.split("\n"))) if stream.isatty() else text


def print_field(name: str, value: object) -> None:
    """Prints a name and its value as one line."""
    print(f"{name:<14} {escape_unprintable(str(value))}")


def format_json(results: dict[str, Any]) -> str:
    """Formats the results as JSON. NaN becomes null, and objects without a JSON form become strings."""
    text = json.dumps(results, default=str)
    without_nan = json.loads(text, parse_constant=lambda _: None)
    return json.dumps(without_nan, indent=1)


class Console:
    """Prints permanent lines and a live line.

    enabled: whether to print at all; only rank 0 does. stream: stdout by default.
    """

    def __init__(self, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.enabled = enabled
        self.stream = stream or sys.stdout or open(os.devnull, "w")
        self.has_live_line = enabled and self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.live_text = ""  # the text of the live line
        self.next_update = 0.0

    def print_line(self, text: str) -> None:
        """Prints one or more permanent lines, and removes the live line."""
        if not self.enabled:
            return
        self.clear()
        print(escape_for(self.stream, text), file=self.stream, flush=True)

    def show_progress(self, text: str) -> None:
        """Shows a live line, cut to the width of the terminal, until the next output. Frequent updates are skipped."""
        if self.has_live_line and time.monotonic() >= self.next_update:
            self.clear()
            self.live_text = escape_for(self.stream, text)[: self._width()]
            self.next_update = time.monotonic() + SECONDS_BETWEEN_UPDATES
            print("\r" + self.live_text, end="", file=self.stream, flush=True)

    def _width(self) -> int:
        """Returns the number of usable columns.

        The last column is not used, because some terminals then break the line.
        """
        return shutil.get_terminal_size().columns - 1

    def clear(self) -> None:
        """Removes the live line."""
        if self.live_text:
            spaces = " " * min(len(self.live_text), self._width())
            print(f"\r{spaces}", end="\r", file=self.stream)
            self.live_text = ""


discard_line: PrintLine = Console(enabled=False).print_line


class BestEffortFile(io.FileIO):
    """A file that discards data it can't write.

    Later writes are attempted again, because a full disk can have space later.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def ignore_output_errors() -> None:
    """Makes later writes to stdout and stderr ignore errors.

    Training then continues if the reader of a pipe has exited, or if the disk is full.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # A stream can be closed, and the streams of a notebook do not have a file number.
        with contextlib.suppress(AttributeError, io.UnsupportedOperation):
            stream.flush()
            file = io.BufferedWriter(BestEffortFile(stream.fileno(), "w", closefd=False))
            text = io.TextIOWrapper(file, stream.encoding, "replace", line_buffering=True)
            setattr(sys, name, text)
