"""What is told when things go wrong: the exception for what a user can fix, and the note that torchrun looks for."""

import json
import os
import time
import traceback
from pathlib import Path


class UserError(Exception):
    """A user's mistake or a condition of their machine; the message says what is wrong, where, and what to do.

    Verbs print it as `error: ...` without a traceback and exit 2.
    """


def first_line(error: BaseException) -> str:
    """The first line of an exception's message: some libraries write pages."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def leave_for_torchrun(error: BaseException) -> None:
    """Write the exception where torchrun, if it runs us, looks for it: the launcher ends the log with it."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
        message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
        Path(path).write_text(json.dumps({"message": message}))
