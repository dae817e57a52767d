"""Checks whether this Python can run the command, before the command imports other modules. This file must work with
any Python 3. This is why its annotations are strings."""

import importlib.util
import os
import signal
import sys
import types

MIN_PYTHON = (3, 10)


def require_packages(*packages: str) -> None:
    """Exits with code 2 and an error message if this Python is too old or runs with -OO, if one of `packages` is missing,
    or if there is no folder for temporary files. After this call, Ctrl-C prints one line, even while modules are
    imported."""
    sys.excepthook = _report_interrupt
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle_interrupt)
    _prefer_own_packages()
    if sys.flags.optimize > 1:
        _exit_with_error("-OO removes the texts of --help; leave it out, and unset PYTHONOPTIMIZE")
    needed = (*packages, "math")  # math is missing if PYTHONHOME belongs to another Python
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if sys.version_info < MIN_PYTHON:
        missing = ["features of Python %d.%d" % MIN_PYTHON]
    if missing and "PYTHONHOME" in os.environ:
        message = "PYTHONHOME=%s belongs to another Python than %s; unset PYTHONHOME"
        _exit_with_error(message % (os.environ["PYTHONHOME"], sys.executable))
    if missing:
        message = "%s lacks %s; use .venv/bin/python, which ./0.create_env.sh makes"
        _exit_with_error(message % (sys.executable, ", ".join(missing)))
    import tempfile  # imported here because it fails if PYTHONHOME belongs to another Python

    try:
        tempfile.gettempdir()  # torch and other packages call it during their import
    except OSError:
        _exit_with_error(
            "there is no folder for temporary files; set TMPDIR to one that can be written"
        )
    if os.isatty(1) and os.isatty(2) and "RANK" not in os.environ:
        sys.stderr.write("loading the libraries ...\n")


def _exit_with_error(message: str) -> None:
    sys.stderr.write("error: %s\n" % message)
    raise SystemExit(2)


def _prefer_own_packages() -> None:
    """Moves the folders of PYTHONPATH to the end of sys.path, so that packages of this environment are found first. On
    clusters, module files put folders with packages for another Python into PYTHONPATH. The folder of this project is
    not moved."""
    project = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    words = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    named = [os.path.abspath(word) for word in words if word]
    last = [folder for folder in sys.path if folder in named and folder != project]
    sys.path[:] = [folder for folder in sys.path if folder not in last] + last


def _handle_interrupt(number: int, frame: "types.FrameType | None") -> None:
    """Handles Ctrl-C. If a module is being imported, the process exits at once, because some modules catch
    KeyboardInterrupt during their import and are then only half imported. Otherwise raises KeyboardInterrupt."""
    while frame:
        if frame.f_code.co_name == "_find_and_load":  # this function runs during each import
            os.write(2, b"\nstopped by Ctrl-C\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _report_interrupt(
    kind: "type[BaseException]", error: BaseException, trace: "types.TracebackType | None"
) -> None:
    if kind is KeyboardInterrupt:
        sys.stderr.write("\nstopped by Ctrl-C\n")
    else:
        sys.__excepthook__(kind, error, trace)
