"""What a process prints while it trains: whoever reads it may go (a closed window, `| head`); training continues."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


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
        except (OSError, ValueError):  # ValueError: a character that the stream's encoding lacks, or it is closed
            self.failed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def output_that_may_go() -> Iterator[None]:
    """Inside, no print raises, whosever it is. A stream that failed stays silent afterwards: Python would end with exit
    code 120 if it can't write the rest."""
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
