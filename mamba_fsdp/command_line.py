"""What all verbs share: Fire splits words, annotations give their types, a mistake is two lines and no traceback."""

import dataclasses
import errno
import inspect
import os
import sys
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any

import fire

import mamba_fsdp
from config.fields import KINDS, near_name, read, read_field
from mamba_fsdp.errors import UserError, leave_for_torchrun
from mamba_fsdp.report.console import Console

VERSION = f"mamba_fsdp {mamba_fsdp.__version__}"


def run(
    verb: Callable[..., Any], help_page: Callable[[], str], arguments: Sequence[str] | None = None
) -> None:
    """Call `verb` with the command line's words and exit with its code.

    help_page: gives the text of --help. Exit codes: what the verb returns or 0; a UserError's own; 130 for Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if {"--version", "--help", "-h"} & {*arguments} or arguments == ["help"]:
            Console().line(VERSION if "--version" in arguments else help_page())
            raise SystemExit(0)
        raise SystemExit(call(verb, arguments) or 0)
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except Exception as error:
        # Wherever a path is used:
        if (
            isinstance(error, OSError)
            and error.filename
            and error.errno in (errno.EACCES, errno.ENAMETOOLONG)
        ):
            error = UserError(f"{error.filename}: {error.strerror}")
        leave_for_torchrun(error)
        if not isinstance(error, UserError):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def call(verb: Callable[..., Any], arguments: Sequence[str]) -> Any:
    """verb(...) with its words as the values of its parameters.

    A parameter's annotation gives the type of its value, and as Annotated[type, Bounds(...)] the bounds; without one it
    stays text; tuple[str, ...] is of an option that may be repeated. One that is a dataclass of settings takes all
    options that are its fields. Raises UserError for words that don't fit: too many, missing, unknown (with the nearest
    name), of the wrong type or out of bounds.
    """
    signature = inspect.signature(verb)
    annotations: dict[str, Any] = {name: p.annotation for name, p in signature.parameters.items()}
    if "--" in arguments:  # behind which Fire takes flags of its own
        raise UserError("nothing is expected after --; see --help")
    others, several = _take_repeated(
        arguments, [name for name, kind in annotations.items() if kind == tuple[str, ...]]
    )
    positional, named = split(others)
    named |= several
    groups: dict[str, Any] = {
        name: kind for name, kind in annotations.items() if dataclasses.is_dataclass(kind)
    }
    fields = {leaf.name: leaf for group in groups.values() for leaf in dataclasses.fields(group)}
    known = [*(name for name in annotations if name not in groups), *fields]
    takes_any_name = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in named:
        if name not in known and not takes_any_name:
            raise UserError(
                f"--{name}: there is no such option; {near_name(name, known, 'see --help', '--')}"
            )
    for name, group in groups.items():
        given = {
            leaf.name: named.pop(leaf.name)
            for leaf in dataclasses.fields(group)
            if leaf.name in named
        }
        named[name] = group(
            **{name: read_field(f"--{name}", fields[name], text) for name, text in given.items()}
        )
    try:
        bound = signature.bind(*positional, **named)
    except TypeError as error:
        raise UserError(f"{error}; see --help") from None
    for name, text in bound.arguments.items():
        bounded = typing.get_origin(annotations[name]) is typing.Annotated
        kind, *bounds = typing.get_args(annotations[name]) if bounded else [annotations[name]]
        if kind in KINDS and isinstance(text, tuple):  # of a parameter such as *words
            bound.arguments[name] = tuple(read(name, kind, word, *bounds) for word in text)
        elif kind in KINDS:
            bound.arguments[name] = read(f"--{name}", kind, text, *bounds)
    return verb(*bound.args, **bound.kwargs)


def _take_repeated(
    words: Sequence[str], names: Collection[str]
) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """(the other words, all values of each of these options)."""
    found: dict[str, tuple[str, ...]] = {}
    others, rest = [], iter(words)
    for word in rest:
        option, equals, text = word.partition("=")
        if option[:2] == "--" and (name := option[2:]) in names:
            if (value := text if equals else next(rest, None)) is None:
                raise UserError(f"{option}: its value is missing")
            found[name] = (*found.get(name, ()), value)
        else:
            others.append(word)
    return others, found


def split(arguments: Sequence[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """(positional, named) words, by Fire's rules but none of them guessed into a type: 0123 stays 0123."""
    words: list[tuple[tuple[str, ...], dict[str, Any]]] = []

    @fire.decorators.SetParseFn(str)
    def capture(*positional, **named):
        words.append((positional, named))

    fire.Fire(capture, command=list(arguments))
    positional, named = words[0]
    # Fire takes --no_wandb for the opposite of a flag called _wandb.
    return positional, {
        **{name: text for name, text in named.items() if not name.startswith("_")},
        **{f"no{name}": "True" for name in named if name.startswith("_")},
    }
