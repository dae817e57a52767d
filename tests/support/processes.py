"""Waiting for what real processes do."""

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


def finish(process):
    """(exit code, what was said) of a Popen."""
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, output
