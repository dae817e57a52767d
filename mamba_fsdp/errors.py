"""Defines the errors that a user can fix, and the commands that their messages recommend."""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
MEMORY_ADVICE = (
    "lower batch_size or seq_length, set fsdp_activation_checkpointing=true, or add ranks; "
    "see `mamba-fsdp plan`"
)


class UserError(Exception):
    """An error that the user can fix. The message explains what is wrong, where, and what to do.

    A command prints `error: <message>` without a traceback and exits with `exit_code`.
    """

    # With this code, 1.train.sbatch does not queue the job again, because a restart can't fix the error.
    exit_code = 2


class LeaseLostError(UserError):
    """This process has lost the lease of a folder. It must not write there any more, because another process can write
    there now."""


class TransientError(UserError):
    """A transient failure, or a failure of a single node, such as a full GPU. The launcher restarts the ranks."""

    exit_code = 1


class NodeFault(TransientError):
    """A fault of this process's node, such as a GPU that computes wrong values. The job continues without the node."""

    exit_code = 75


class StorageError(UserError):
    """Storage kept failing during all retries. A later start can succeed."""

    exit_code = 74  # EX_IOERR in sysexits.h


def merge_errors(errors: Sequence[UserError], before: str = "") -> UserError:
    """Combines several errors into one. Its message consists of `before` and the first four different messages.

    The result is a StorageError if any of the errors is one, else a TransientError if any of them is one, else a UserError.
    """
    messages = list(dict.fromkeys(map(str, errors)))
    shown = messages[:4]
    if len(messages) > 4:
        shown.append(f"and {len(messages) - 4} more")
    message = before + "; ".join(shown)
    for kind in (StorageError, TransientError):
        if any(isinstance(error, kind) for error in errors):
            return kind(message)
    return UserError(message)


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message. Some libraries write messages of several pages."""
    message = str(error).strip() or type(error).__name__
    return message.splitlines()[0]


def out_of_memory_message(error: BaseException, who: str) -> str:
    """Returns a message with advice if the GPU or the host is out of memory, or "" for any other error.

    who: the name of the process. The message begins with it.
    """
    text = first_line(error)
    torch_messages = "out of memory|can't allocate memory|Storage size calculation overflowed"
    is_full = isinstance(error, RuntimeError) and re.search(torch_messages, text)
    if not is_full and not isinstance(error, MemoryError):
        return ""
    return f"{who} has too little memory: {MEMORY_ADVICE} ({text[:200]})"


def command(verb: str) -> str:
    """Returns the command line that runs a verb. The command line depends on where this program runs: in the image, from
    a checkout, or from an installed package."""
    if os.environ.get("IMAGE") and verb == "tokenize":
        return "sbatch 2.tokenize.sbatch"
    folder = _environment()
    if folder is None:
        return f"mamba-fsdp {verb}"
    if verb == "tokenize":
        return f"{folder}.venv/bin/python {folder}get_dataset.py"
    return f"{folder}.venv/bin/mamba-fsdp {verb}"


def python() -> str:
    """Returns the command that starts the Python interpreter of this environment."""
    folder = _environment()
    return "python" if folder is None else f"{folder}.venv/bin/python"


def _environment() -> str | None:
    """Returns the path to prepend to .venv/: "" if the checkout is the current folder. Returns None in the image and
    for an installed package, because they have no .venv."""
    if os.environ.get("IMAGE") or not is_checkout():
        return None
    return "" if os.getcwd() == str(PROJECT) else f"{shlex.quote(str(PROJECT))}/"


def install_command(extra: str) -> str:
    """Returns the command that installs the packages of `extra`, an optional dependency group of pyproject.toml."""
    folder = _environment()
    packages = extra if folder is None else f"-r {folder}requirements/{extra}.txt"
    return f"{python()} -m pip install {packages}"


def is_checkout() -> bool:
    """Returns whether this program runs from a checkout rather than from an installed package."""
    return (PROJECT / "get_dataset.py").exists()
