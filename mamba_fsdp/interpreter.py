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
    lacks one of `packages`, or that there is no temporary folder. From here on Ctrl-C prints one line, even while modules are imported."""
    sys.excepthook = _report_stop
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    _prefer_own_packages()
    if sys.flags.optimize > 1:
        _refuse("-OO removes the texts of --help; leave it out, and unset PYTHONOPTIMIZE")
    needed = (*packages, "math")  # which another Python's folder of modules lacks
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if sys.version_info < OLDEST:
        missing = ["what Python %d.%d has" % OLDEST]
    if missing and "PYTHONHOME" in os.environ:
        message = "PYTHONHOME=%s is another Python's than %s; unset PYTHONHOME"
        _refuse(message % (os.environ["PYTHONHOME"], sys.executable))
    if missing:
        message = "%s lacks %s; use .venv/bin/python, which ./0.create_env.sh makes"
        _refuse(message % (sys.executable, ", ".join(missing)))
    import tempfile  # which another Python's modules can't import

    try:
        tempfile.gettempdir()  # torch and others need it while they are imported
    except OSError:
        _refuse("there is no folder for temporary files; set TMPDIR to one that can be written")
    if os.isatty(1) and os.isatty(2) and "RANK" not in os.environ:
        sys.stderr.write("loading the libraries ...\n")


def _refuse(message: str) -> None:
    sys.stderr.write("error: %s\n" % message)
    raise SystemExit(2)


def _prefer_own_packages() -> None:
    """Looks for packages in this environment first, and then in the folders of PYTHONPATH: a cluster's module files name
    folders there whose packages are another Python's. This project's own folder stays where it is."""
    project = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    words = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    named = [os.path.abspath(word) for word in words if word]
    last = [folder for folder in sys.path if folder in named and folder != project]
    sys.path[:] = [folder for folder in sys.path if folder not in last] + last


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
