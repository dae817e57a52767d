"""Writes programs, runs them, and waits for them."""

import os
import subprocess
import time

PATIENCE_SECONDS = 400  # long, because a loaded machine is slow and a timeout is a failure


def wait_until(happened, what="it"):
    """Calls happened() until it returns a true value, and returns this value. Raises TimeoutError with `what`."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        if value := happened():
            return value
        time.sleep(0.05)
    raise TimeoutError(f"{PATIENCE_SECONDS} s passed before {what}")


def run_program(*command, cwd=None, **environment):
    """Runs a command to its end. Returns the process with its stdout and stderr."""
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def write_program(path, text):
    """Writes an executable program with this text, and returns its path. Makes its folder if
    necessary.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def finish(process):
    """Waits for a Popen. Returns (exit code, output)."""
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, output
