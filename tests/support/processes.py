"""Programs that are written, run and waited for."""

import os
import subprocess
import time

PATIENCE_SECONDS = 400  # a busy machine is slow; only what never comes is a failure


def wait_until(happened, what="it"):
    """happened()'s first true value. Raises TimeoutError that says `what` never came."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        if value := happened():
            return value
        time.sleep(0.05)
    raise TimeoutError(f"{PATIENCE_SECONDS} s passed before {what}")


def run_program(*command, cwd=None, **environment):
    """The finished process of a command, with what it wrote to stdout and to stderr."""
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def write_program(path, text):
    """The path of a program of this text, whose folder is made where it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def finish(process):
    """(exit code, what was said) of a Popen."""
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, output
