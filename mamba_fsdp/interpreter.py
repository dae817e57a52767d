"""Checks whether this Python can run the command, before the command imports more. Any Python 3 reads this
file; its annotations are strings for the same reason."""

import importlib.util
import os
import signal
import sys
import types

OLDEST = (3, 10)


def need(*packages: str) -> None:
    """Ends the process with exit code 2 and says which Python to use, if this one is too old or
    lacks one of `packages`. From here on Ctrl-C prints one line, even while modules are imported."""
    sys.excepthook = _report_stop
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if sys.version_info < OLDEST:
        missing = ["what Python %d.%d has" % OLDEST]
    if missing:
        message = "error: %s lacks %s; use .venv/bin/python, which ./0.create_env.sh makes\n"
        sys.stderr.write(message % (sys.executable, ", ".join(missing)))
        raise SystemExit(2)
    if os.isatty(1) and os.isatty(2) and "RANK" not in os.environ:
        sys.stderr.write("loading the libraries ...\n")


def _stop(number: int, frame: "types.FrameType | None") -> None:
    """Handles Ctrl-C. While a module is imported it ends the process: some modules swallow the
    exception, and stay half imported."""
    while frame:
        if frame.f_code.co_name == "_find_and_load":  # Python's own, of each import
            os.write(2, b"\nstopped by Ctrl-C\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _report_stop(
    kind: "type[BaseException]", error: BaseException, trace: "types.TracebackType | None"
) -> None:
    if kind is KeyboardInterrupt:
        sys.stderr.write("\nstopped by Ctrl-C\n")
    else:
        sys.__excepthook__(kind, error, trace)
