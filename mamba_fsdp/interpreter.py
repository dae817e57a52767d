"""Can this Python run the command? Asked before the command imports more, in words that any Python
3 reads."""

import importlib.util
import os
import shlex
import sys

OLDEST = (3, 10)
PROJECT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def need(*packages):
    """Ends the process with exit code 2 and the Python to use, where this one is too old or lacks
    one of `packages`. From here on Ctrl-C is one line, also while modules are imported."""
    sys.excepthook = _say_stopped
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if sys.version_info < OLDEST:
        reason = "is Python %d.%d; it takes %d.%d or newer" % (*sys.version_info[:2], *OLDEST)
    elif missing:
        reason = "lacks %s" % ", ".join(missing)
    else:
        return
    python = os.path.join(PROJECT, ".venv", "bin", "python")
    remedy = "use the project's own:"
    if not os.path.exists(python) or sys.executable == python:
        remedy = "make the project's own, ./0.create_env.sh, then"
    if os.getcwd() == PROJECT:
        python = os.path.relpath(python)
    words = [python] + getattr(sys, "orig_argv", [""])[1:]
    command = " ".join(map(shlex.quote, words))
    sys.stderr.write("error: %s %s; %s %s\n" % (sys.executable, reason, remedy, command))
    raise SystemExit(2)


def _say_stopped(kind, error, trace):
    if kind is KeyboardInterrupt:
        sys.stderr.write("\nstopped by Ctrl-C\n")
    else:
        sys.__excepthook__(kind, error, trace)
