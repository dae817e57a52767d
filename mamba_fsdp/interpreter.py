"""Can this Python run the command? Asked before the command imports more, in words that any Python
3 reads."""

import importlib.util
import sys

OLDEST = (3, 10)


def need(*packages):
    """Ends the process with exit code 2 and says which Python to use, where this one is too old or
    lacks one of `packages`. From here on Ctrl-C is one line, also while modules are imported."""
    sys.excepthook = _say_stopped
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if sys.version_info < OLDEST:
        missing = ["what Python %d.%d has" % OLDEST]
    if missing:
        told = "error: %s lacks %s; use .venv/bin/python, which ./0.create_env.sh makes\n"
        sys.stderr.write(told % (sys.executable, ", ".join(missing)))
        raise SystemExit(2)


def _say_stopped(kind, error, trace):
    if kind is KeyboardInterrupt:
        sys.stderr.write("\nstopped by Ctrl-C\n")
    else:
        sys.__excepthook__(kind, error, trace)
