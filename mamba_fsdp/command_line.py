"""What all verbs share: Fire splits words, annotations give their types, a mistake is two lines and
no traceback."""

import dataclasses
import errno
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import fire

import mamba_fsdp
from config.fields import KINDS, near_name, read, read_field
from mamba_fsdp.errors import UserError, leave_for_torchrun
from mamba_fsdp.report.console import Console, fit_for

MOST_OF_A_LINE = 2000  # characters of an error, which may quote what a file holds
VERSION = f"mamba_fsdp {mamba_fsdp.__version__}"


def run(
    verb: Callable[..., Any], help_page: Callable[[], str], arguments: Sequence[str] | None = None
) -> None:
    """Calls `verb` with the command line's words and exits with its code.

    help_page: gives the text of --help. Exit codes: what the verb returns or 0; a UserError's own;
    130 for Ctrl-C.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    try:
        if "--version" in arguments:
            Console().line(VERSION)
            raise SystemExit(0)
        if {"--help", "-h"} & {*arguments} or arguments == ["help"]:
            Console().line(help_page())
            raise SystemExit(0)
        raise SystemExit(call(verb, arguments) or 0)
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except OSError as error:
        if not error.filename or error.errno not in (errno.EACCES, errno.ENAMETOOLONG):
            leave_for_torchrun(error)
            raise
        _fail(UserError(f"{error.filename}: {error.strerror}"))  # wherever a path is used
    except UserError as error:
        _fail(error)
    except Exception as error:
        leave_for_torchrun(error)
        raise


def _fail(error: UserError) -> NoReturn:
    """Ends the process with the error as one line."""
    leave_for_torchrun(error)
    lines = [line[:MOST_OF_A_LINE] for line in f"error: {error}".splitlines()]
    print(fit_for(sys.stderr, "\n".join(lines)), file=sys.stderr)
    raise SystemExit(error.exit_code) from None


def call(verb: Callable[..., Any], arguments: Sequence[str]) -> Any:
    """verb(...) with its words as the values of its parameters.

    A parameter's annotation gives the type of its value; without one it stays text. One that is a dataclass of settings takes all options that
    are its fields. Raises UserError for words that don't fit: too many, missing, unknown (with the
    nearest name), of the wrong type or out of bounds.
    """
    if "--" in arguments:  # behind which Fire takes flags of its own
        raise UserError("nothing is expected after --; see --help")
    parameters = inspect.signature(verb).parameters
    positional, named = split(arguments)
    _check_known(named, parameters)
    for name, parameter in parameters.items():
        if dataclasses.is_dataclass(parameter.annotation):
            named[name] = _read_group(parameter.annotation, named)
    try:
        bound = inspect.signature(verb).bind(*positional, **named)
    except TypeError as error:
        raise UserError(f"{error}; see --help") from None
    for name, value in bound.arguments.items():
        bound.arguments[name] = _read_value(parameters[name], value)
    return verb(*bound.args, **bound.kwargs)


def _check_known(named: Collection[str], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Raises UserError for an option that is no parameter and no field of a dataclass among
    them."""
    known = []
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:  # takes any
            return
        if dataclasses.is_dataclass(parameter.annotation):
            known += [leaf.name for leaf in dataclasses.fields(parameter.annotation)]
        else:
            known.append(name)
    for name in named:
        if name not in known:
            hint = near_name(name, known, "see --help", "--")
            raise UserError(f"--{name}: there is no such option; {hint}")


def _read_group(group: Any, named: dict[str, Any]) -> Any:
    """The dataclass `group` with those of the options that are its fields, which leave `named`."""
    values = {}
    for leaf in dataclasses.fields(group):
        if leaf.name in named:
            values[leaf.name] = read_field(f"--{leaf.name}", leaf, named.pop(leaf.name))
    return group(**values)


def _read_value(parameter: inspect.Parameter, value: Any) -> Any:
    """The value of a parameter from its text, or texts where it is one such as *words."""
    kind = parameter.annotation
    if kind not in KINDS:
        return value
    if isinstance(value, tuple):
        return tuple(read(parameter.name, kind, word) for word in value)
    return read(f"--{parameter.name}", kind, value)


def split(arguments: Sequence[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """(positional, named) words, by Fire's rules but none of them guessed into a type: 0123 stays
    0123."""
    words: list[tuple[tuple[str, ...], dict[str, Any]]] = []

    @fire.decorators.SetParseFn(str)
    def capture(*positional, **named):
        words.append((positional, named))

    fire.Fire(capture, command=list(arguments))
    positional, named = words[0]
    found = {}
    for name, text in named.items():
        if name.startswith("_"):  # Fire takes --no_wandb for the opposite of a flag called _wandb
            found[f"no{name}"] = "True"
        else:
            found[name] = text
    return positional, found
