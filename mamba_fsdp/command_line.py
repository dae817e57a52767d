"""What all verbs share: Fire splits the words, the verb's annotations give their types, and a user's mistake is two
lines without a traceback."""

import difflib
import inspect
import os
import sys

import fire

from mamba_fsdp.errors import UserError, leave_for_torchrun

BOOLEANS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


def run(verb, help_page, arguments=None):
    """Call `verb` with the command line's words and exit with its code.

    help_page: a function that gives the text of --help. Exit codes: what the verb returns or 0; 2 for a UserError, 130
    for Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if {"--help", "-h"} & set(_cut_at_dashes(arguments)[0]) or arguments == ["help"]:
            print(help_page(), flush=True)
            raise SystemExit(0)
        raise SystemExit(call(verb, arguments) or 0)
    except UserError as error:
        leave_for_torchrun(error)
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except Exception as error:
        leave_for_torchrun(error)
        raise


def call(verb, arguments):
    """verb(...) with its words as text, made int, float or bool where an annotation says so; words after `--` as the
    list `after_dashes` where the verb has it. Raises UserError for words that don't fit: too many, missing, unknown
    (with the nearest name) or of the wrong type."""
    signature = inspect.signature(verb)
    arguments, after_dashes = _cut_at_dashes(list(arguments))
    positional, named = split(arguments)
    if "after_dashes" in signature.parameters:
        named["after_dashes"] = after_dashes
    elif after_dashes is not None:
        raise UserError(f"-- {' '.join(after_dashes)}: nothing is expected after --; see --help")
    takes_any_name = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in named:
        if name not in signature.parameters and not takes_any_name:
            near = difflib.get_close_matches(name, signature.parameters, n=1, cutoff=0.5)
            hint = f"did you mean --{near[0]}?" if near else "see --help"
            raise UserError(f"--{name}: there is no such option; {hint}")
    try:
        bound = signature.bind(*positional, **named)
    except TypeError as error:
        raise UserError(f"{error}; see --help") from None
    for name, value in bound.arguments.items():
        bound.arguments[name] = _convert(name, value, signature.parameters[name].annotation)
    return verb(*bound.args, **bound.kwargs)


def _cut_at_dashes(arguments):
    if "--" not in arguments:
        return arguments, None
    return arguments[:arguments.index("--")], arguments[arguments.index("--") + 1:]


def split(arguments):
    """(positional, named) words, by Fire's rules but none of them guessed into a type: 0123 stays 0123."""
    words = []

    @fire.decorators.SetParseFn(str)
    def capture(*positional, **named):
        words.append((positional, named))

    fire.Fire(capture, command=list(arguments))
    return words[0]


def _convert(name, value, kind):
    try:
        if kind is bool:
            return BOOLEANS[value.lower()]
        return kind(value) if kind in (int, float) else value
    except (KeyError, ValueError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise UserError(f"--{name}={value}: expected {wanted}") from None
