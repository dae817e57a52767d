"""What is told when things go wrong: the exception for what a user can mend, and the note that torchrun looks for."""

import json
import os
import time
import traceback


class UserError(Exception):
    """A user's mistake or a condition of their machine. Its message says what is wrong, where, and what to do; verbs
    print it as `error: ...` without a traceback and exit 2."""


def first_line(error):
    """The first line of an exception's message: some libraries write pages."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def leave_for_torchrun(error):
    """Under torchrun: write the exception into the file where it looks, in its form, so that the launcher can end the
    log with it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
        with open(path, "w") as file:
            json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": details}}, file)
