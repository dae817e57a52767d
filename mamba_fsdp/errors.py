"""Defines the exceptions for what a user can fix, the words of their messages, and the error file that
torchrun reads."""

import difflib
import json
import os
import re
import shlex
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
TAKES_LESS = (
    "lower batch_size or seq_length, set fsdp_activation_checkpointing=true, or add ranks; "
    "see `mamba-fsdp plan`"
)


class UserError(Exception):
    """A user's mistake or a condition of their machine; the message says what is wrong, where, and
    what to do.

    Verbs print it as `error: ...` without a traceback and exit with its `exit_code`.
    """

    exit_code = 2  # no restart fixes it: 1.train.sbatch does not queue the job again


class LostError(UserError):
    """Another process has taken over what this one wrote to; this one must not write there any more."""


class Accident(UserError):
    """A transient failure, or one of a single node, such as a full GPU: the launcher starts the ranks again."""

    exit_code = 1


class NodeFault(Accident):
    """A fault of this process's own node, such as a GPU that computes wrong values: the job trains without the node."""

    exit_code = 75


class StorageError(UserError):
    """Storage that kept failing; a later start may succeed."""

    exit_code = 74  # EX_IOERR of sysexits.h


def joined(errors: Sequence[UserError], before: str = "") -> UserError:
    """Returns one error with `before` and the first messages of `errors`; a StorageError or an Accident if any of them
    is one."""
    messages = list(dict.fromkeys(map(str, errors)))
    shown = messages[:4]
    if len(messages) > 4:
        shown.append(f"and {len(messages) - 4} more")
    message = before + "; ".join(shown)
    for kind in (StorageError, Accident):
        if any(isinstance(error, kind) for error in errors):
            return kind(message)
    return UserError(message)


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message: some libraries write pages."""
    message = str(error).strip() or type(error).__name__
    return message.splitlines()[0]


def too_little_memory(error: BaseException, who: str) -> str:
    """Returns the message for an error of a full memory, of a device or of the machine; "" for another error. who: the
    process."""
    text = first_line(error)
    of_torch = "out of memory|can't allocate memory|Storage size calculation overflowed"
    is_full = isinstance(error, RuntimeError) and re.search(of_torch, text)
    if not is_full and not isinstance(error, MemoryError):
        return ""
    return f"{who} has too little memory: {TAKES_LESS} ({text[:200]})"


def command(verb: str) -> str:
    """Returns the words that start a verb, as the user of this environment types them."""
    if os.environ.get("IMAGE") and verb == "tokenize":
        return "sbatch 2.tokenize.sbatch"
    folder = _environment()
    if folder is None:
        return f"mamba-fsdp {verb}"
    if verb == "tokenize":
        return f"{folder}.venv/bin/python {folder}get_dataset.py"
    return f"{folder}.venv/bin/mamba-fsdp {verb}"


def python() -> str:
    """Returns the name of the Python that has this program's packages, as the user of this environment types it."""
    folder = _environment()
    return "python" if folder is None else f"{folder}.venv/bin/python"


def _environment() -> str | None:
    """Returns what is written before .venv/; None for an image and for an installed package, which have none."""
    if os.environ.get("IMAGE") or not is_checkout():
        return None
    return "" if os.getcwd() == str(PROJECT) else f"{shlex.quote(str(PROJECT))}/"


def install_command(extra: str) -> str:
    """Returns the command that installs the packages of an extra of pyproject.toml."""
    folder = _environment()
    packages = extra if folder is None else f"-r {folder}requirements/{extra}.txt"
    return f"{python()} -m pip install {packages}"


def is_checkout() -> bool:
    """Returns whether this program runs from a checkout, and not from an installed package."""
    return (PROJECT / "get_dataset.py").exists()


def import_command(source: str | Path, out: str = "OUT") -> str:
    """Returns the command that makes a token store from `source`."""
    return f"{command('tokenize')} {shlex.quote(str(source))} {out}"


def near_name(
    name: str,
    candidates: Iterable[str],
    otherwise: str,
    dashes: str = "",
    elsewhere: Mapping[str, str] = {},
) -> str:
    """Returns a hint for an unknown `name`: the candidate that is probably meant, by its own
    name or by that of other programs (elsewhere: {their name: candidate}); else `otherwise`."""
    near = difflib.get_close_matches(name, [*candidates, *elsewhere], n=1, cutoff=0.75)
    if not near:
        return otherwise
    return f"did you mean {dashes}{elsewhere.get(near[0], near[0])}?"


def near_path(path: Path) -> str:
    """Returns a hint for a path that does not exist: its target if it is a link, else a similar name next to it; "" if
    there is none."""
    if path.is_symlink():
        return f"; it is a link to {os.readlink(path)}"
    hint = near_name(path.name, [neighbour.name for neighbour in path.parent.glob("*")], "")
    return f"; {hint}" if hint else ""


def one_line(text: str) -> str:
    """Returns a text that a file may hold as it can be printed: a line break, for example, becomes \\n, so that the text
    neither begins a line of its own nor controls a terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def with_unit(number: float, unit: str) -> str:
    """Returns a number with the prefixed unit: 12345678, "B" -> 12.3 MB."""
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.1f} {prefix}{unit}"
    return f"{number:.0f} {unit}"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: 1 step, 1,000 steps, 2 losses."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def leave_for_torchrun(error: BaseException) -> None:
    """Writes the exception to torchrun's error file, if torchrun has started this process: the launcher ends the log
    with it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    exit_code = 1
    text = "".join(traceback.format_exception(error))
    if isinstance(error, UserError):
        exit_code = error.exit_code
        text = f"error: {error}\n"
    details = {
        "py_callstack": text,
        "timestamp": str(int(time.time())),
        "exit_code": str(exit_code),
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
    Path(path).write_text(json.dumps({"message": message}))
