"""Can this Python run the command? Asked before the command imports more, in words that any Python
3 reads. And what a terminal shows while the command imports more."""

import importlib.util
import os
import signal
import sys

OLDEST = (3, 10)


def need(*packages):
    """Ends the process with exit code 2 and says which Python to use, where this one is too old or
    lacks one of `packages`. From here on Ctrl-C is one line, also while modules are imported."""
    sys.excepthook = _say_stopped
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if sys.version_info < OLDEST:
        missing = ["what Python %d.%d has" % OLDEST]
    if missing:
        told = "error: %s lacks %s; use .venv/bin/python, which ./0.create_env.sh makes\n"
        sys.stderr.write(told % (sys.executable, ", ".join(missing)))
        raise SystemExit(2)
    if os.isatty(1) and os.isatty(2) and "RANK" not in os.environ:
        sys.stdout = Overwriting(sys.stdout)
        sys.stderr = Overwriting(sys.stderr)
        show_wait()


def show_wait():
    """Says on a terminal that libraries are loaded, until something else is said."""
    if isinstance(sys.stderr, Overwriting):
        os.write(2, b"loading the libraries ...")
        Overwriting.wipe = "\r\033[K"


def _stop(number, frame):
    """What Ctrl-C does. While a module is imported it ends the process: some modules swallow the
    exception, and go on half imported."""
    while frame:
        if frame.f_code.co_name == "_find_and_load":  # Python's own, of each import
            os.write(2, b"\nstopped by Ctrl-C\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _say_stopped(kind, error, trace):
    if kind is KeyboardInterrupt:
        sys.stderr.write("\nstopped by Ctrl-C\n")
    else:
        sys.__excepthook__(kind, error, trace)


class Overwriting:
    """stdout or stderr of a terminal: what comes first on either takes the place of the line that
    is shown."""

    wipe = ""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        text = Overwriting.wipe + text
        Overwriting.wipe = ""
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)
